"""Saves the data of untrained groups, running ones included, in a checkpoint: arrays end to end in one
safetensors file, all else in a JSON file.

payloads.safetensors    an array per field: every segment of every trajectory, one after another
payloads.json           groups -> trajectories: lengths of their segments, reward, finish reason, other fields

Fields that the profile no longer declares are left out; new ones have their `fill`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NotRequired, cast

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from asyncrl_cli.base.errors import RefusedError
from asyncrl_cli.base.safe_files import Count, Finite, load_json, open_regular, reason
from asyncrl_cli.base.storage import naming
from asyncrl_cli.data.ragged import Ragged
from asyncrl_cli.data.sample_fields import (
    BUILT_IN,
    FINISH_REASON,
    MASK,
    REQUIRED,
    REWARD,
    Schema,
)
from asyncrl_cli.data.trajectories import HEADS, GroupPayload, Trajectory, packed, unpacked

ARRAYS = "payloads.safetensors"
STRUCTURE = "payloads.json"
WAY_OUT = "take another checkpoint"


class _Trajectory(TypedDict):
    reward: Finite
    finish_reason: str
    segment_lengths: list[Count]
    turn_rewards: NotRequired[list[Finite]]
    facts: NotRequired[dict[str, Finite]]
    teacher_name: NotRequired[str]
    values: NotRequired[dict[str, Any]]
    """Of fields that are not built in."""


class _Group(TypedDict):
    uid: str
    epoch: Count
    attempt: Count
    trajectories: list[_Trajectory]


class _Structure(TypedDict):
    """`payloads.json`."""

    schema_version: Literal[2]
    groups: list[_Group]


def write_payloads(directory: Path, payloads: Sequence[GroupPayload], schema: Schema = BUILT_IN) -> None:
    """Write the groups (perhaps none) in the given order. The checkpoint store hashes and flushes the files
    later."""
    everything = [one for group in payloads for one in group.trajectories]
    columns = packed(everything, schema)
    stored = (field for field in schema.arrays if field.in_checkpoints and field.by != "scorer")
    names = {field.column: field.name for field in stored}
    arrays = {name: schema[name].filled(0) for name in REQUIRED}
    arrays |= {name: columns[column] for column, name in names.items() if column in columns}
    with naming(directory / ARRAYS):
        save_file(arrays, directory / ARRAYS)
    structure: _Structure = {"schema_version": 2, "groups": []}
    for group in payloads:
        lines = [_line(one, schema) for one in group.trajectories]
        structure["groups"].append(
            {"uid": group.uid, "epoch": group.epoch, "attempt": group.attempt, "trajectories": lines}
        )
    with naming(directory / STRUCTURE):
        (directory / STRUCTURE).write_text(json.dumps(structure), encoding="utf-8")


def _line(one: Trajectory, schema: Schema) -> _Trajectory:
    line: dict[str, Any] = {
        REWARD: 0.0,
        FINISH_REASON: "abort",
        "segment_lengths": [count.tokens for count in one.counts],
    }
    for name, value in one.values.items():
        if name in BUILT_IN:
            line[name] = value
        elif schema[name].in_checkpoints:
            line.setdefault("values", {})[name] = value
    return cast(_Trajectory, line)


def read_payloads(directory: Path, schema: Schema = BUILT_IN) -> tuple[GroupPayload, ...]:
    """Read the groups in the order written. Raises RefusedError if the two files do not fit each other."""
    groups = load_json(directory / STRUCTURE, _Structure, hint=WAY_OUT)["groups"]
    path = directory / ARRAYS
    try:
        open_regular(path).close()
        arrays = load_file(path)
    # KeyError: a dtype that numpy does not have
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise RefusedError(f"{path} cannot be read: {reason(error)}", hint=WAY_OUT) from None
    if missing := [name for name in REQUIRED if name not in arrays]:
        raise RefusedError(f"{path} does not hold {', '.join(missing)}", hint=WAY_OUT)
    arrays = {name: array for name, array in arrays.items() if name in schema and schema[name].is_array}
    lengths = [
        length for group in groups for one in group["trajectories"] for length in one["segment_lengths"]
    ]
    for name, array in sorted(arrays.items(), key=lambda entry: entry[0] not in REQUIRED):  # the mask first
        field = schema[name]
        if not field.fits(array):
            raise RefusedError(f"{path}: {name} is not as the profile declares it", hint=WAY_OUT)
        expected = sum(lengths) if field.per == "token" else int(arrays[MASK].sum())
        try:
            found = len(Ragged.decoded(array, expected) if field.is_ragged else array)
        except ValueError:
            found = -1
        if found != expected:
            raise RefusedError(f"{path} does not fit {STRUCTURE}: {expected} tokens expected", hint=WAY_OUT)
    ends_S = np.cumsum([0, *lengths])
    sampled_S = np.diff(np.concatenate([[0], np.cumsum(arrays[MASK])])[ends_S])
    counts, heads = zip(lengths, sampled_S.tolist(), strict=True), []
    for line in (line for group in groups for line in group["trajectories"]):
        built_in = {name: value for name, value in line.items() if name in BUILT_IN}
        further = {n: value for n, value in line.get("values", {}).items() if n in schema}
        heads.append(([*islice(counts, len(line["segment_lengths"]))], further | built_in))
    columns = {schema[name].column: array for name, array in arrays.items()}
    trajectories = iter(unpacked({HEADS: heads, **columns}))
    return tuple(
        GroupPayload(
            uid=group["uid"],
            epoch=group["epoch"],
            attempt=group["attempt"],
            trajectories=tuple(islice(trajectories, len(group["trajectories"]))),
        )
        for group in groups
    )
