"""The pool of simulated runs: who answers a workload's references, what a failure or a Ctrl-C leaves."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest

from asyncrl_cli.bench import compare
from asyncrl_cli.bench.compare import Request, compare_simulated, remarks_of
from asyncrl_cli.bench.reference_rows import rows_of
from asyncrl_cli.bench.simulated import SimulatedJob, simulate_all
from asyncrl_cli.errors import ConfigError, Interrupted
from asyncrl_cli.observe.bound import Capacities
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.simulate.references import residuals
from asyncrl_cli.simulate.workload import Workload
from asyncrl_cli.simulate.workloads import profile_for

PROFILE = {"placement": {"gpus": 4}, "trainer": {"ppo_mini_batch_size": 4}, "rollout": {"n": 4, "slots": 64}}
WINDOW_GROUPS = 4
"""Colocate's: one step of `require_batches` = 1 mini-batch."""
ENOUGH_GROUPS = 8 * WINDOW_GROUPS
"""Of colocate, to answer a reference: 6 windows that are measured, one before and one after."""


def workload(*references: dict[str, Any]) -> Workload:
    return Workload.model_validate(
        {
            "name": "small",
            "windows": 5,
            "profile": PROFILE,
            "lengths": {"median_tokens": 20.0, "sigma": 0.5},
            "decoding": {"step_s": 0.01, "step_s_per_sequence": 0.001},
            "training": {"s_per_token": 0.001},
            "syncing": {"parameter_bytes": 1e6, "gather_bytes_per_s": 1e8, "send_bytes_per_s": 1e8, "load_bytes_per_s": 1e8},
            "references": [{"set": {}, "parts_s": {}, "window_time_s": 1.0, **reference} for reference in references],
        }
    )


def profile(reference: str, *sets: str) -> Profile:
    return profile_for(workload(), reference, sets, groups=ENOUGH_GROUPS).profile


def job(made: Workload, reference: str = "colocate", *, groups: int = ENOUGH_GROUPS, seed: int = 0) -> SimulatedJob:
    loaded = profile_for(made, reference, (), groups=groups)
    return SimulatedJob(profile=loaded.profile, workload=made, seed=seed, groups=groups, keep_timeline=False)


COLOCATE = {"profile": "colocate", "parts_s": {"train": 0.5}}


@pytest.mark.parametrize(
    ("run", "answered"),
    [
        ((profile("colocate"), 0, ENOUGH_GROUPS), True),
        ((profile("colocate"), 0, ENOUGH_GROUPS + WINDOW_GROUPS), True),
        ((profile("colocate"), 0, ENOUGH_GROUPS - WINDOW_GROUPS), False),
        ((profile("colocate"), 1, ENOUGH_GROUPS), False),
        ((profile("colocate", "rollout.slots=32"), 0, ENOUGH_GROUPS), False),
        ((profile("partial-rollout"), 0, ENOUGH_GROUPS), False),
    ],
)
def test_a_reference_is_answered_by_the_same_profile_with_the_same_prompts_for_as_long(
    run: tuple[Profile, int, int], answered: bool
) -> None:
    rows = rows_of(workload(COLOCATE, COLOCATE | {"set": {"placement": {"gpus": 2}}}), [(profile("stale-samples"), 0, 999), run])
    assert [row.job for row in rows] == [1 if answered else None, None]


@pytest.mark.slow
def test_a_run_that_answers_a_reference_gives_the_residuals_that_a_run_of_its_own_gives() -> None:
    other = {"profile": "partial-rollout", "window_time_s": 2.0, "calibrated": False}
    made = workload(other, COLOCATE)
    (result,), fit = simulate_all([job(made)], made, lambda name, groups: None)
    assert result.lines.lines[-1]["groups_trained"] == ENOUGH_GROUPS
    assert fit == residuals(made)
    assert [(one.profile, one.part) for one in fit] == [
        ("partial-rollout", "window"),
        ("colocate", "window"),
        ("colocate", "train"),
    ]


@pytest.mark.slow
def test_a_remark_says_of_every_row_whether_it_was_published_or_measured() -> None:
    made = workload(COLOCATE | {"source": "published, 4 GPUs"}, {"profile": "partial-rollout", "calibrated": False})
    _, fit = simulate_all([job(made), job(made, "partial-rollout", groups=160)], made, lambda name, groups: None)
    published, measured = remarks_of(made, fit)
    assert published.startswith("colocate (calibrated on), seconds per window: window 1 published, ")
    assert "train 0.5 published, " in published
    assert measured.startswith("partial-rollout (predicted), seconds per window: window 1 measured, ")


def test_an_unknown_part_of_a_reference_is_an_error_also_where_a_run_answers_it() -> None:
    made = workload({"profile": "colocate", "parts_s": {"trains": 1.0}})
    with pytest.raises(ConfigError, match="no part trains"):
        simulate_all([job(made)], made, lambda name, groups: None)
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_an_interrupt_ends_all_runs_in_their_middle() -> None:
    made = workload()

    def interrupt(name: str, groups: int) -> None:
        assert groups < 400_000
        raise KeyboardInterrupt

    jobs = [job(made, groups=400_000, seed=seed) for seed in (0, 1)]
    with pytest.raises(Interrupted) as raised:
        simulate_all(jobs, made, interrupt)
    assert raised.value.exit_code == 130
    assert multiprocessing.active_children() == []


class Quiet:
    def run(self, name: str, groups: int, total: int, told: Any = None) -> None: ...

    def note(self, text: str, done: int, total: int) -> None: ...

    def say(self, text: str) -> None: ...


@pytest.mark.slow
def test_every_simulated_run_has_its_own_capacities(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the lengths that its seed drew."""
    held: dict[tuple[str, int], Capacities] = {}

    def summarise(contestants: Any, runs: Any, capacities: Any, *, window_groups: int) -> list[Any]:
        held.update(capacities)
        return as_ever(contestants, runs, capacities, window_groups=window_groups)

    as_ever: Any = compare.summarise
    monkeypatch.setattr(compare, "summarise", summarise)
    request = Request(baseline="colocate", profiles=("partial-rollout",), repeat=2, groups=64)
    outcome = compare_simulated(request, workload(), Quiet())
    assert held.keys() == {(name, seed) for name in ("colocate", "partial-rollout") for seed in (0, 1)}
    assert held["colocate", 0].trainer_tokens_per_s != held["colocate", 1].trainer_tokens_per_s
    assert [timeline.profile for timeline in outcome.timelines] == ["colocate", "partial-rollout"]
