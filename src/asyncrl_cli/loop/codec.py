"""Results of groups as JSON, for the checkpoint's loop state."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated, Any, cast

from annotated_types import Len
from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from asyncrl_cli.loop.attempts import AttemptKey, GroupResult, TrajectoryMeta
from asyncrl_cli.safe_files import Count

Key = tuple[str, Count, Count]
"""uid, epoch, attempt."""


class ResultState(TypedDict):
    """Everything but the payload, which a checkpoint keeps apart."""

    key: Key
    failures: tuple[str, ...]
    failed_tokens: Count
    trajectories: Annotated[tuple[TrajectoryMeta, ...], Len(2)]


def encode_result(result: GroupResult) -> ResultState:
    fields = asdict(replace(result, payload=None))
    del fields["payload"]
    return cast("ResultState", fields)


def decode_result(state: ResultState, payload: Any) -> GroupResult:
    return GroupResult(
        key=AttemptKey(*state["key"]),
        trajectories=state["trajectories"],
        failures=state["failures"],
        failed_tokens=state["failed_tokens"],
        payload=payload,
    )
