from __future__ import annotations

import pytest

from asyncrl_cli.profile.arithmetic import Schedule
from asyncrl_cli.simulate.workload_files import Residual, load_workload, profile_for, residuals


def test_every_profile_consumes_512_prompts_per_window() -> None:
    workload = load_workload("verl-7b-math-128")
    names = "colocate on-policy-pipeline stream-off-policy stale-samples partial-rollout one-step-off"
    for name in names.split():
        assert Schedule.of(profile_for(workload, name, environ={}).profile).window_groups == 512, name


@pytest.mark.slow
def test_the_published_rows_are_met() -> None:
    """Those that have to be met most closely are simulated for longer."""
    workload = load_workload("verl-7b-math-128")
    found: dict[tuple[str, str], Residual] = {
        (residual.profile, residual.part): residual
        for row in workload.references
        for residual in residuals(
            workload, row, windows=3 if row.calibrated and not row.set.get("placement") else 1
        )
    }
    of_eta = "partial-rollout async_training.staleness_threshold=0.1"
    for name in ("colocate", "partial-rollout", of_eta):
        assert found[name, "window"].ratio == pytest.approx(1.0, abs=0.05), name
    assert found["colocate placement.gpus=64", "window"].ratio == pytest.approx(1.0, abs=0.15)
    unfitted = {name: one.ratio for (name, _), one in found.items() if not one.calibrated}
    assert unfitted == {
        "partial-rollout async_training.staleness_threshold=0.3": pytest.approx(1.0, abs=0.1),
        "stream-off-policy": pytest.approx(1.0, abs=0.1),
    }


def test_published_rows_that_were_not_fitted_are_shown_too() -> None:
    rows = load_workload("verl-7b-math-128").references
    assert [row.profile for row in rows if not row.calibrated] == ["partial-rollout", "stream-off-policy"]
