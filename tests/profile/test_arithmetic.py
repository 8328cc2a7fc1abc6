from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.profile.arithmetic import Schedule
from asyncrl_cli.profile.loaded import load
from asyncrl_cli.profile.schema import Profile


def schedule_of(*sets: str, reference: str = "base") -> Schedule:
    return Schedule.of(load(reference, sets, environ={}).profile)


@given(
    mini_batch=st.integers(1, 300),
    batches=st.integers(1, 8),
    window_steps=st.integers(1, 16),
    eta_percent=st.integers(0, 400),
    train_steps=st.integers(1, 1000),
    epochs=st.integers(1, 4),
)
def test_all_numbers_agree_with_exact_fractions(
    mini_batch: int, batches: int, window_steps: int, eta_percent: int, train_steps: int, epochs: int
) -> None:
    profile = Profile.model_validate(
        {
            "run": {"train_steps": train_steps},
            "trainer": {"ppo_mini_batch_size": mini_batch, "ppo_epochs": epochs},
            "async_training": {
                "require_batches": batches,
                "trigger_parameter_sync_step": window_steps,
                "staleness_threshold": eta_percent / 100,
            },
        }
    )
    schedule = Schedule.of(profile)
    window_groups = mini_batch * batches * window_steps
    assert schedule.window_groups == window_groups
    assert schedule.budget_groups == window_groups * (100 + eta_percent) // 100
    assert schedule.max_staleness == math.ceil(Fraction(eta_percent, 100))
    assert schedule.groups == train_steps * mini_batch * batches
    assert (schedule.syncs - 1) * window_groups + schedule.last_window_groups == schedule.groups
    assert 0 < schedule.last_window_groups <= window_groups
    assert schedule.optimizer_steps == train_steps * batches * epochs


def test_an_eta_written_as_015_admits_115_of_100_groups() -> None:
    sets = "trainer.ppo_mini_batch_size=100", "async_training.staleness_threshold=0.15"
    assert schedule_of(*sets).budget_groups == 115


def test_a_run_that_is_no_whole_number_of_windows_has_a_shorter_last_one() -> None:
    schedule = schedule_of("run.train_steps=10", reference="stream-off-policy")
    assert (schedule.window_groups, schedule.syncs, schedule.last_window_groups) == (64, 3, 32)


def test_a_length_in_groups_is_the_same_run_as_one_in_train_steps() -> None:
    assert schedule_of("run.total_rollout_steps=320") == schedule_of("run.train_steps=20")


@pytest.mark.parametrize(
    ("sets", "mode"),
    [
        ([], "on-policy-pipeline"),
        (["trigger_parameter_sync_step=4"], "stream-off-policy"),
        (["staleness_threshold=0.25"], "stale-samples"),
        (["trigger_parameter_sync_step=3", "staleness_threshold=1"], "stale-samples"),
        (["staleness_threshold=1"], "one-step-off"),
        (["staleness_threshold=1", "partial_rollout=true"], "partial-rollout"),
    ],
)
def test_the_mode_follows_from_the_knobs(sets: list[str], mode: str) -> None:
    assert schedule_of(*(f"async_training.{text}" for text in sets)).mode == mode


@pytest.mark.parametrize("steps", [1, 4])
def test_colocate_is_a_mode_of_its_own_with_any_k(steps: int) -> None:
    schedule = schedule_of(f"async_training.trigger_parameter_sync_step={steps}", reference="colocate")
    assert schedule.mode == "colocate"
