"""Groups as JSON, for the checkpoint's loop state. Prompts are named, not kept: the feed finds them again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl_cli.loop.ports import AttemptKey, GroupResult, TrajectoryMeta


def encode_key(key: AttemptKey) -> list[Any]:
    return list(key)


def decode_key(data: list[Any]) -> AttemptKey:
    uid, epoch, attempt = data
    return AttemptKey(uid, epoch, attempt)


def encode_result(result: GroupResult) -> dict[str, Any]:
    """Everything but the payload, which a checkpoint keeps apart."""
    return {
        "key": encode_key(result.key),
        "failures": list(result.failures),
        "failed_tokens": result.failed_tokens,
        "trajectories": [
            {
                "prompt_tokens": meta.prompt_tokens,
                "response_tokens": meta.response_tokens,
                "reward": meta.reward,
                "finish_reason": meta.finish_reason,
                "version_tokens": [list(pair) for pair in meta.version_tokens],
            }
            for meta in result.trajectories
        ],
    }


def decode_result(data: Mapping[str, Any], payload: Any) -> GroupResult:
    return GroupResult(
        key=decode_key(data["key"]),
        trajectories=tuple(
            TrajectoryMeta(
                prompt_tokens=meta["prompt_tokens"],
                response_tokens=meta["response_tokens"],
                reward=meta["reward"],
                finish_reason=meta["finish_reason"],
                version_tokens=tuple((version, tokens) for version, tokens in meta["version_tokens"]),
            )
            for meta in data["trajectories"]
        ),
        failures=tuple(data["failures"]),
        failed_tokens=data["failed_tokens"],
        payload=payload,
    )
