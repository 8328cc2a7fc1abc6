"""Groups as JSON, for the checkpoint's loop state. Prompts are named, not kept: the feed finds them again."""

from __future__ import annotations

from typing import Annotated, Any

from annotated_types import Len
from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from asyncrl_cli.loop.ports import AttemptKey, GroupResult, TrajectoryMeta
from asyncrl_cli.safe_files import Count, Finite

Key = tuple[str, Count, Count]
"""uid, epoch, attempt."""


class TrajectoryState(TypedDict):
    prompt_tokens: Count
    response_tokens: Count
    reward: Finite
    finish_reason: str
    version_tokens: Annotated[list[tuple[Count, Count]], Len(1)]


class ResultState(TypedDict):
    """Everything but the payload, which a checkpoint keeps apart."""

    key: Key
    failures: list[str]
    failed_tokens: Count
    trajectories: Annotated[list[TrajectoryState], Len(2)]


def encode_result(result: GroupResult) -> ResultState:
    return {
        "key": result.key,
        "failures": list(result.failures),
        "failed_tokens": result.failed_tokens,
        "trajectories": [
            {
                "prompt_tokens": meta.prompt_tokens,
                "response_tokens": meta.response_tokens,
                "reward": meta.reward,
                "finish_reason": meta.finish_reason,
                "version_tokens": list(meta.version_tokens),
            }
            for meta in result.trajectories
        ],
    }


def decode_result(data: ResultState, payload: Any) -> GroupResult:
    return GroupResult(
        key=AttemptKey(*data["key"]),
        trajectories=tuple(
            TrajectoryMeta(
                prompt_tokens=meta["prompt_tokens"],
                response_tokens=meta["response_tokens"],
                reward=meta["reward"],
                finish_reason=meta["finish_reason"],
                version_tokens=tuple(meta["version_tokens"]),
            )
            for meta in data["trajectories"]
        ),
        failures=tuple(data["failures"]),
        failed_tokens=data["failed_tokens"],
        payload=payload,
    )
