"""Saves the tokens of untrained groups, running ones included, in a checkpoint: arrays end to end in one
safetensors file, segment lengths in a JSON file.

payloads.safetensors    tokens, logprobs, versions, mask: every segment of every trajectory, one after another
payloads.json           groups -> trajectories (reward, finish reason) -> lengths of their segments
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NotRequired

import numpy as np
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
    segments = [segment for group in payloads for one in group.trajectories for segment in one.segments]
    arrays = {}
    for name, dtype in DTYPES.items():
        parts = [np.zeros(0, dtype), *(getattr(segment, f"{name}_T") for segment in segments)]
        arrays[name] = np.concatenate(parts).astype(dtype)
    with naming(directory / ARRAYS):
        save_file(arrays, directory / ARRAYS)
    structure: _Structure = {"schema_version": 1, "groups": []}
    for group in payloads:
        entry: _Group = {"uid": group.uid, "epoch": group.epoch, "attempt": group.attempt, "trajectories": []}
        for one in group.trajectories:
            lengths = [len(segment.tokens_T) for segment in one.segments]
            trajectory: _Trajectory = {
                "reward": one.reward,
                "finish_reason": one.finish_reason,
                "segment_lengths": lengths,
            }
            if one.turn_rewards:
                trajectory["turn_rewards"] = list(one.turn_rewards)
            entry["trajectories"].append(trajectory)
        structure["groups"].append(entry)
    with naming(directory / STRUCTURE):
        (directory / STRUCTURE).write_text(json.dumps(structure), encoding="utf-8")


def read_payloads(directory: Path) -> tuple[GroupPayload, ...]:
    """Read the groups in the order written. Raises RefusedError if the two files do not fit each other."""
    groups = load_json(directory / STRUCTURE, _Structure, hint=WAY_OUT)["groups"]
    path = directory / ARRAYS
    try:
        open_regular(path).close()
        arrays = load_file(path)
    # KeyError: a dtype that numpy does not have
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise RefusedError(f"{path} cannot be read: {reason(error)}", hint=WAY_OUT) from None
    expected = {name: (np.dtype(dtype), 1) for name, dtype in DTYPES.items()}
    if {name: (array.dtype, array.ndim) for name, array in arrays.items()} != expected:
        raise RefusedError(f"{path} does not hold {', '.join(DTYPES)}", hint=WAY_OUT)
    num_tokens = sum(sum(one["segment_lengths"]) for group in groups for one in group["trajectories"])
    if {len(array) for array in arrays.values()} != {num_tokens}:
        raise RefusedError(f"{path} does not fit {STRUCTURE}: {num_tokens} tokens expected", hint=WAY_OUT)
    payloads, begin = [], 0
    for group in groups:
        trajectories = []
        for one in group["trajectories"]:
            segments = []
            for length in one["segment_lengths"]:
                rows = slice(begin, begin + length)
                segments.append(Segment(**{f"{n}_T": array[rows].copy() for n, array in arrays.items()}))
                begin += length
            trajectories.append(
                Trajectory(
                    segments=tuple(segments),
                    reward=one["reward"],
                    finish_reason=one["finish_reason"],
                    turn_rewards=tuple(one.get("turn_rewards", ())),
                )
            )
        uid, epoch, attempt = group["uid"], group["epoch"], group["attempt"]
        whole = tuple(trajectories)
        payloads.append(GroupPayload(uid=uid, epoch=epoch, attempt=attempt, trajectories=whole))
    return tuple(payloads)
