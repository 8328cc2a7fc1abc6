"""A profile's limits in the loop: what wins where several could end a wait."""

from __future__ import annotations

import pytest

from asyncrl_cli.profile.arithmetic import LoopSettings
from asyncrl_cli.profile.loaded import load


def limits(profile: str, *sets: str) -> tuple[float, float]:
    settings = LoopSettings.of(load(profile, list(sets), environ={}).profile)
    return settings.stall_timeout_s, settings.sync_timeout_s


@pytest.mark.parametrize("profile", ["stale-samples", "partial-rollout", "colocate"])
def test_the_watchdog_waits_longer_than_any_call_that_has_a_limit_of_its_own(profile: str) -> None:
    keys = (
        "rollout.call_timeout_s=5000 weights.timeout_s=7000 eval.timeout_s=9000 trainer.step_timeout_s=8000"
    )
    for sets in ([], *([key] for key in keys.split())):
        loaded = load(profile, sets, environ={}).profile
        stall_s, sync_s = limits(profile, *sets)
        own_s = loaded.rollout.call_timeout_s, loaded.weights.timeout_s, loaded.trainer.step_timeout_s
        assert stall_s == max(*own_s, loaded.eval.timeout_s, sync_s) + 60


def test_a_limit_that_was_set_stays() -> None:
    assert limits("partial-rollout", "run.stall_timeout_s=20")[0] == 20


def test_how_far_a_worker_may_be_from_the_trainer_depends_on_the_dtype_unless_it_is_given() -> None:
    def limit(*sets: str) -> float:
        return LoopSettings.of(load("partial-rollout", list(sets), environ={}).profile).max_logprob_diff

    assert (limit(), limit("model.dtype=bfloat16")) == (1e-3, 0.1)
    assert limit("model.dtype=bfloat16", "weights.max_logprob_diff=0.02") == 0.02
