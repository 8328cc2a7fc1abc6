"""The trajectories of one train step as text lines (`samples/step-000040.jsonl`), for eyes and audits."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl_cli.samples.trajectory import GroupPayload, Segment, Trajectory

SCHEMA_VERSION = 1
Decode = Callable[[list[int]], str]
"""Token ids to text, e.g. a tokenizer's `decode`."""


def samples_path(directory: Path, step: int) -> Path:
    return directory / f"step-{step:06d}.jsonl"


def is_dump_step(step: int, every_steps: int) -> bool:
    """Whether `logging.samples_every_steps` asks for this step (counted from 1); 0 is never."""
    return every_steps > 0 and step % every_steps == 0


def dump_samples(
    directory: Path, step: int, payloads: Sequence[GroupPayload], *, window: int, decode: Decode | None = None
) -> Path:
    """Write one line per trajectory of `step`, whole or not at all. Text is there if `decode` is given.

    Arrays cover all tokens; several segments lie end to end, cut by `segment_lengths`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = samples_path(directory, step)
    temporary = path.with_name(f".{path.name}.tmp")
    # Half a surrogate pair, as some tokenizers decode to, becomes \\udxxx: JSON's own way to write it.
    with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
        for group in payloads:
            for index, trajectory in enumerate(group.trajectories):
                line = {"step": step, "window": window, **_line(group, index, trajectory, decode)}
                file.write(json.dumps({"schema_version": SCHEMA_VERSION, **line}, ensure_ascii=False) + "\n")
    temporary.replace(path)
    return path


def read_samples(path: Path) -> list[dict[str, Any]]:
    """The lines of a dump, as written."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _line(group: GroupPayload, index: int, trajectory: Trajectory, decode: Decode | None) -> dict[str, Any]:
    segments = trajectory.segments
    return {
        "group": f"{group.uid}@{group.epoch}.{group.attempt}",
        "uid": group.uid,
        "epoch": group.epoch,
        "attempt": group.attempt,
        "trajectory": index,
        "reward": trajectory.reward,
        "finish_reason": trajectory.finish_reason,
        **(_texts(segments, decode) if decode else {}),
        "tokens": [token for s in segments for token in _ids(s)],
        "logprobs": [float(value) for s in segments for value in s.logprobs_T],
        "versions": [int(value) for s in segments for value in s.versions_T],
        "mask": [int(value) for s in segments for value in s.mask_T],
        "segment_lengths": [len(s.tokens_T) for s in segments],
    }


def _ids(segment: Segment) -> list[int]:
    return [int(token) for token in segment.tokens_T]


def _texts(segments: Sequence[Segment], decode: Decode) -> dict[str, str]:
    """The whole text, and what the policy itself wrote of it."""
    sampled = ([int(token) for token in s.tokens_T[np.asarray(s.mask_T, dtype=bool)]] for s in segments)
    return {
        "text": "".join(decode(_ids(s)) for s in segments),
        "sampled_text": "".join(decode(tokens) for tokens in sampled),
    }
