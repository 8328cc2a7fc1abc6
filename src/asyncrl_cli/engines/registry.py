"""A profile's engine: made, or checked before it is made."""

from __future__ import annotations

from collections.abc import Callable

from asyncrl_cli.engines.port import Engine, EngineKind, Sampling
from asyncrl_cli.plugins import engine_kind
from asyncrl_cli.profile.place import Place
from asyncrl_cli.profile.schema import Profile, RolloutSection


def kind_of(profile: Profile) -> EngineKind:
    kind: EngineKind = engine_kind(profile.rollout.engine)
    return kind


def make_engine(profile: Profile, place: Place, on_running: Callable[[int], None]) -> Engine:
    """The engine, not yet started. Raises PreflightError if it cannot run on this machine."""
    kind = kind_of(profile)
    kind.check_here(place.device)
    return kind.make(profile, place, on_running)


def sampling_of(rollout: RolloutSection, temperature: float) -> Sampling:
    return Sampling(
        temperature=temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_response_tokens=rollout.max_response_tokens,
        stop=rollout.stop,
    )


def check_engine(profile: Profile, device: str, *, is_elsewhere: bool = False) -> None:
    """Raises PreflightError if the engine cannot run here, ConfigError if it would refuse its arguments.

    `is_elsewhere`: the workers run on the nodes of a cluster, and each looks on its own node when it starts.
    """
    kind = kind_of(profile)
    if is_elsewhere:
        kind.check_driver()
    else:
        kind.check_here(device)
        kind.check_arguments(profile, device)
