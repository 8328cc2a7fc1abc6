"""Saves the tokens of untrained groups, running ones included, in a checkpoint: arrays end to end in one
safetensors file, segment lengths in a JSON file.

payloads.safetensors    tokens, logprobs, versions, mask: every segment of every trajectory, one after the other
payloads.json           groups -> trajectories (reward, finish reason) -> lengths of their segments
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NotRequired

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from asyncrl_cli.base.errors import RefusedError
from asyncrl_cli.base.safe_files import Count, Finite, load_json, open_regular, reason
from asyncrl_cli.base.storage import naming
from asyncrl_cli.contracts.trajectories import GroupPayload, Segment, Trajectory

ARRAYS = "payloads.safetensors"
STRUCTURE = "payloads.json"
WAY_OUT = "take another checkpoint"
DTYPES = {"tokens": np.int32, "logprobs": np.float32, "versions": np.int32, "mask": np.bool_}


class _Trajectory(TypedDict):
    reward: Finite
    finish_reason: str
    segment_lengths: list[Count]
    turn_rewards: NotRequired[list[Finite]]


class _Group(TypedDict):
    uid: str
    epoch: Count
    attempt: Count
    trajectories: list[_Trajectory]


class _Structure(TypedDict):
    """`payloads.json`."""

    schema_version: Literal[1]
    groups: list[_Group]


def write_payloads(directory: Path, payloads: Sequence[GroupPayload]) -> None:
    """Write the groups (perhaps none) in the given order. The checkpoint store hashes and flushes the files
    later."""
    segments = [
        segment for group in payloads for trajectory in group.trajectories for segment in trajectory.segments
    ]
    arrays = {
        name: np.concatenate(
            [np.zeros(0, dtype), *(getattr(segment, f"{name}_T") for segment in segments)]
        ).astype(dtype)
        for name, dtype in DTYPES.items()
    }
    with naming(directory / ARRAYS):
        save_file(arrays, directory / ARRAYS)
    structure: _Structure = {"schema_version": 1, "groups": [_structure(group) for group in payloads]}
    with naming(directory / STRUCTURE):
        (directory / STRUCTURE).write_text(json.dumps(structure), encoding="utf-8")


def read_payloads(directory: Path) -> tuple[GroupPayload, ...]:
    """Read the groups in the order written. Raises RefusedError if the two files do not fit each other."""
    groups = load_json(directory / STRUCTURE, _Structure, hint=WAY_OUT)["groups"]
    arrays = _read_arrays(directory / ARRAYS)
    lengths = [
        length
        for group in groups
        for trajectory in group["trajectories"]
        for length in trajectory["segment_lengths"]
    ]
    if {len(array) for array in arrays.values()} != {sum(lengths)}:
        raise RefusedError(
            f"{directory / ARRAYS} does not fit {STRUCTURE}: {sum(lengths)} tokens expected", hint=WAY_OUT
        )
    ends = list(accumulate(lengths))
    segments = iter(
        Segment(**{f"{name}_T": array[end - length : end].copy() for name, array in arrays.items()})
        for end, length in zip(ends, lengths, strict=True)
    )
    return tuple(_group(entry, segments) for entry in groups)


def _read_arrays(path: Path) -> Mapping[str, NDArray[Any]]:
    try:
        open_regular(path).close()
        arrays = load_file(path)
    # KeyError: a dtype that numpy does not have
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise RefusedError(f"{path} cannot be read: {reason(error)}", hint=WAY_OUT) from None
    if {name: (array.dtype, array.ndim) for name, array in arrays.items()} != {
        n: (np.dtype(d), 1) for n, d in DTYPES.items()
    }:
        raise RefusedError(f"{path} does not hold {', '.join(DTYPES)}", hint=WAY_OUT)
    return arrays


def _structure(group: GroupPayload) -> _Group:
    trajectories = []
    for trajectory in group.trajectories:
        lengths = [len(segment.tokens_T) for segment in trajectory.segments]
        entry = _Trajectory(
            reward=trajectory.reward, finish_reason=trajectory.finish_reason, segment_lengths=lengths
        )
        if trajectory.turn_rewards:
            entry["turn_rewards"] = list(trajectory.turn_rewards)
        trajectories.append(entry)
    return {"uid": group.uid, "epoch": group.epoch, "attempt": group.attempt, "trajectories": trajectories}


def _group(entry: _Group, segments: Iterator[Segment]) -> GroupPayload:
    trajectories = []
    for told in entry["trajectories"]:
        own = tuple(next(segments) for _ in told["segment_lengths"])
        end: Any = {
            "finish_reason": told["finish_reason"],
            "turn_rewards": tuple(told.get("turn_rewards", ())),
        }
        trajectories.append(Trajectory(segments=own, reward=told["reward"], **end))
    return GroupPayload(
        uid=entry["uid"], epoch=entry["epoch"], attempt=entry["attempt"], trajectories=tuple(trajectories)
    )
