"""The pool of simulated runs: how well the workload fits its references, what a failure or a Ctrl-C
leaves."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from asyncrl_cli.base.errors import AsyncrlError, ConfigError, Interrupted
from asyncrl_cli.bench import comparison
from asyncrl_cli.bench.comparison import compare, remarks_of
from asyncrl_cli.bench.contest import contest_of
from asyncrl_cli.bench.simulated_runs import SimulatedJob, simulate_all
from asyncrl_cli.simulate.workload import Workload
from asyncrl_cli.simulate.workload_files import profile_for, residuals
from tests.bench.quiet import Quiet
from tests.simulate.small_workload import COSTS

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
            **tomllib.loads(COSTS),
            "references": [
                {"set": {}, "parts_s": {}, "window_time_s": 1.0, **reference} for reference in references
            ],
        }
    )


def job(
    made: Workload, reference: str = "colocate", *, groups: int = ENOUGH_GROUPS, seed: int = 0
) -> SimulatedJob:
    loaded = profile_for(made, reference, (), groups=groups)
    return SimulatedJob(loaded=loaded, workload=made, seed=seed)


COLOCATE = {"profile": "colocate", "parts_s": {"train": 0.5}}


@pytest.mark.slow
def test_runs_have_the_capacities_of_their_own_lengths_and_the_workload_is_held_against_its_references() -> (
    None
):
    published = COLOCATE | {"source": "4 GPUs", "evidence": "published"}
    made = workload({"profile": "partial-rollout", "window_time_s": 2.0, "calibrated": False}, published)
    runs, fit, _ = simulate_all([job(made), job(made, seed=1)], WINDOW_GROUPS, lambda name, groups: None)
    assert [run.lines[-1]["groups_trained"] for run in runs] == [ENOUGH_GROUPS, ENOUGH_GROUPS]
    assert len({run.capacities.trainer_tokens_per_s for run in runs if run.capacities}) == 2
    assert fit == residuals(made)
    rows = [("partial-rollout", "window"), ("colocate", "window"), ("colocate", "train")]
    assert [(one.profile, one.part) for one in fit] == rows
    predicted, fitted = remarks_of(made, fit)
    assert predicted.startswith("partial-rollout (predicted), seconds per window: window 2 measured, ")
    assert fitted.startswith("colocate (calibrated on), seconds per window: window 1 published, ")
    assert "train 0.5 published, " in fitted


@pytest.mark.slow
def test_an_unknown_part_of_a_reference_is_an_error() -> None:
    made = workload({"profile": "colocate", "parts_s": {"trains": 1.0}})
    others = multiprocessing.active_children()
    with pytest.raises(ConfigError, match="no part trains"):
        simulate_all([job(made)], WINDOW_GROUPS, lambda name, groups: None)
    assert set(multiprocessing.active_children()) <= set(others)


@pytest.mark.slow
def test_an_interrupt_ends_all_runs_in_their_middle() -> None:
    made, others = workload(), multiprocessing.active_children()

    def interrupt(name: str, groups: int) -> None:
        assert groups < 400_000
        raise KeyboardInterrupt

    jobs = [job(made, groups=400_000, seed=seed) for seed in (0, 1)]
    with pytest.raises(Interrupted) as raised:
        simulate_all(jobs, WINDOW_GROUPS, interrupt)
    assert raised.value.exit_code == 130
    assert set(multiprocessing.active_children()) <= set(others)


@pytest.mark.slow
def test_runs_that_had_ended_before_an_interrupt_are_kept() -> None:
    made, reports = workload(), Counter[str]()
    short, long = job(made), job(made, groups=400_000, seed=1)

    def interrupt(name: str, groups: int) -> None:
        reports[name] = groups
        if reports[short.name] == ENOUGH_GROUPS and groups > reports["then"] + 500 > 500:
            raise KeyboardInterrupt
        reports["then"] = reports["then"] or (reports[short.name] == ENOUGH_GROUPS) * groups

    runs, fit, interrupted = simulate_all([long, short], WINDOW_GROUPS, interrupt)
    assert [(run.seed, run.lines[-1]["groups_trained"]) for run in runs] == [(0, ENOUGH_GROUPS)]
    assert runs[0].capacities is not None
    assert fit == []
    assert isinstance(interrupted, Interrupted)


@pytest.mark.slow
def test_the_first_run_of_each_profile_is_recorded(tmp_path: Path) -> None:
    made = workload()
    contest = contest_of("colocate", ["partial-rollout"], seeds=(0, 1), groups=64, workload=made)
    compare(contest, tmp_path, Quiet())
    recorded = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert recorded == ["colocate-s0", "partial-rollout-s0"]


@pytest.mark.slow
@pytest.mark.parametrize("error", [Interrupted("interrupted"), AsyncrlError("no such run")])
def test_what_comes_after_all_runs_loses_none_of_them(
    error: AsyncrlError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def outlook(*_: Any) -> None:
        raise error

    monkeypatch.setattr(comparison, "outlook", outlook)
    contest = contest_of("colocate", ["partial-rollout"], groups=64, workload=workload())
    compared = compare(contest, tmp_path, Quiet())
    assert [result.seeds for result in compared.results] == [(0,), (0,)]
    assert type(compared.error) is type(error)


PARENT = """
import os, time
from asyncrl_cli.bench.simulated_runs import simulators
if __name__ == "__main__":
    with simulators(1) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        time.sleep(60)
"""


@pytest.mark.slow
def test_children_end_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    program = tmp_path / "parent.py"
    program.write_text(PARENT)
    search = os.pathsep.join([*sys.path, str(Path(__file__).parents[2])])
    parent = subprocess.Popen(
        [sys.executable, str(program)], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": search}
    )
    assert parent.stdout is not None
    children = [int(pid) for pid in parent.stdout.readline().split()]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until_s = time.monotonic() + 30
    while any(map(_runs, children)) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert len(children) == 1
    assert not any(map(_runs, children))


def _runs(pid: int) -> bool:
    """A zombie that nobody has collected yet does not run."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
