"""The trajectories of a train step as arrays, for `asyncrl replay` and `asyncrl audit`: one safetensors file
(`samples/step-000040.safetensors`) with all that the trainer was given (`logging.samples = "all"`).

    token/<field>, sampled/<field>   of every trajectory, one after another (data/trajectories.py)
    metadata "step"                  JSON: a `StepHead`
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, cast

from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from asyncrl_cli.base.errors import RefusedError
from asyncrl_cli.base.safe_files import Count, open_regular, parse_json, reason
from asyncrl_cli.base.storage import appearing_file, naming
from asyncrl_cli.contracts.prompt_group import GroupResult, TrainBatch
from asyncrl_cli.data.sample_fields import Schema
from asyncrl_cli.data.trajectories import HEADS, GroupPayload, packed, unpacked

METADATA = "step"


class StepGroup(TypedDict):
    """`result`: without `payload`. `heads`: of each trajectory the counts of its segments, and its values.
    `advantages`: None where it was not trained, or where they are not known before the step."""

    result: GroupResult
    heads: list[tuple[list[tuple[Count, Count]], dict[str, Any]]]
    advantages: list[float | None]


class StepHead(TypedDict):
    """`groups`: in the order in which they were taken. `columns`: what scorers had added to them."""

    schema_version: Literal[1]
    step: Count
    window: Count
    step_in_window: Count
    columns: list[str]
    groups: list[StepGroup]


def step_file(directory: Path, step: int) -> Path:
    return directory / f"step-{step:06d}.safetensors"


def write_step(
    directory: Path,
    batch: TrainBatch,
    payloads: Sequence[GroupPayload],
    advantages: Sequence[Sequence[float | None]],
    schema: Schema,
) -> None:
    """Write the step's file atomically. `payloads`, `advantages`: of the batch's groups, in its order."""
    from safetensors.numpy import save_file

    arrays = packed([one for payload in payloads for one in payload.trajectories], schema)
    heads, groups = iter(arrays.pop(HEADS)), []
    for group, payload, row in zip(batch.groups, payloads, advantages, strict=True):
        result = {**asdict(group), "payload": None}
        own = [next(heads) for _ in payload.trajectories]
        groups.append({"result": result, "heads": own, "advantages": list(row)})
    head = {"schema_version": 1, "step": batch.step, "window": batch.window, "groups": groups}
    head |= {"step_in_window": batch.step_in_window, "columns": list(batch.columns)}
    directory.mkdir(parents=True, exist_ok=True)
    path = step_file(directory, batch.step)
    with naming(path), appearing_file(path) as temporary:
        save_file(arrays, temporary, metadata={METADATA: json.dumps(head)})


def read_step(path: Path) -> tuple[TrainBatch, list[GroupPayload], list[list[float | None]]]:
    """What `write_step` was given. Raises RefusedError if the file cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        open_regular(path).close()
        with safe_open(path, framework="np") as file:
            head = parse_json((file.metadata() or {}).get(METADATA, ""), StepHead)
            arrays: Mapping[str, Any] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        heads = [one for group in head["groups"] for one in group["heads"]]
        trajectories = iter(unpacked({**arrays, HEADS: heads}))
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        why = f"{path} cannot be read: {reason(cast(Exception, error))}"
        raise RefusedError(why, hint='a run with logging.samples = "all" writes one for each step') from None
    payloads = []
    for group in head["groups"]:
        key, own = group["result"].key, tuple(next(trajectories) for _ in group["heads"])
        payloads.append(GroupPayload(uid=key.uid, epoch=key.epoch, attempt=key.attempt, trajectories=own))
    batch = TrainBatch(
        step=head["step"],
        window=head["window"],
        step_in_window=head["step_in_window"],
        groups=tuple(group["result"] for group in head["groups"]),
        columns=tuple(head["columns"]),
    )
    return batch, payloads, [group["advantages"] for group in head["groups"]]
