"""The pool of simulated runs: how well the workload fits its references, what a failure or a Ctrl-C
leaves."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl_cli.base.errors import AsyncrlError, ConfigError, Interrupted
from asyncrl_cli.bench import comparison, simulated_runs
from asyncrl_cli.bench.comparison import compare, remarks_of
from asyncrl_cli.bench.contest import contest_of
from asyncrl_cli.bench.results import FinishedRun
from asyncrl_cli.bench.simulated_runs import SimulatedJob, simulate_all, simulators
from asyncrl_cli.simulate.workload import Workload
from asyncrl_cli.simulate.workload_files import Residual, profile_for, residuals
from tests.bench.quiet import Quiet
from tests.bench.test_comparison import lines
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
COLOCATE_FIT = Residual(
    profile="colocate", part="window", measured_s=1.0, predicted_s=1.1, calibrated=True, evidence="measured"
)


@pytest.mark.slow
def test_runs_have_the_capacities_of_their_own_lengths_and_the_workload_is_held_against_its_references() -> (
    None
):
    published = COLOCATE | {"source": "4 GPUs", "evidence": "published"}
    made = workload({"profile": "partial-rollout", "window_time_s": 2.0, "calibrated": False}, published)
    runs, fit, _ = simulate_all([job(made), job(made, seed=1)], lambda name, groups: None)
    assert [run.lines[-1]["groups_trained"] for run in runs] == [ENOUGH_GROUPS, ENOUGH_GROUPS]
    capacities = [run.costs.capacities(WINDOW_GROUPS, 2 * WINDOW_GROUPS) for run in runs if run.costs]
    assert len({one.trainer_tokens_per_s for one in capacities}) == 2
    assert fit == [one for row in made.references for one in residuals(made, row)]
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
        simulate_all([job(made)], lambda name, groups: None)
    assert set(multiprocessing.active_children()) <= set(others)


@pytest.mark.slow
def test_an_interrupt_ends_all_runs_in_their_middle() -> None:
    made, others = workload(), multiprocessing.active_children()

    def interrupt(name: str, groups: int) -> None:
        assert groups < 400_000
        raise KeyboardInterrupt

    jobs = [job(made, groups=400_000, seed=seed) for seed in (0, 1)]
    with pytest.raises(Interrupted, match="no run of colocate had ended") as raised:
        simulate_all(jobs, interrupt)
    assert raised.value.exit_code == 130
    assert set(multiprocessing.active_children()) <= set(others)


@pytest.mark.slow
def test_runs_that_had_ended_before_an_interrupt_are_kept() -> None:
    made, has_ended, groups_then = workload(), False, 0
    short, long = job(made), job(made, groups=400_000, seed=1)

    def interrupt(name: str, groups: int) -> None:
        """A while after the last report of `short`, whose result comes later."""
        nonlocal has_ended, groups_then
        if name == short.name:
            has_ended = groups == ENOUGH_GROUPS
        elif not has_ended:
            groups_then = groups
        elif groups > groups_then + 500:
            raise KeyboardInterrupt

    runs, fit, interrupted = simulate_all([long, short], interrupt)
    assert [(run.seed, run.lines[-1]["groups_trained"]) for run in runs] == [(0, ENOUGH_GROUPS)]
    assert runs[0].costs is not None
    assert fit == []
    assert isinstance(interrupted, Interrupted)


def interrupt_after(monkeypatch: pytest.MonkeyPatch, ended: Sequence[str]) -> None:
    """`simulate_all` is interrupted when the runs of these profiles and the residuals of colocate have
    ended."""

    def submit(work: Any, what: Any, row: Any = None) -> Future[Any]:
        future = Future[Any]()
        if work is residuals:
            if row.profile == "colocate":
                future.set_result([COLOCATE_FIT])
        elif (profile := what.loaded.profile.name) in ended:
            run = FinishedRun(profile=profile, seed=what.seed, lines=lines(64, step_s=1.0, tokens=10))
            future.set_result(run)
        return future

    def wait(*_: Any, **options: Any) -> None:
        raise Interrupted("interrupted")

    pool = SimpleNamespace(submit=submit)
    monkeypatch.setattr(simulated_runs, "simulators", lambda *_: nullcontext(pool))
    monkeypatch.setattr(simulated_runs, "wait", wait)


@pytest.mark.parametrize("ended", [["colocate"], ["colocate", "partial-rollout"]])
def test_an_interrupted_comparison_is_of_what_had_ended_and_says_so(
    ended: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_after(monkeypatch, ended)
    made = workload(COLOCATE, {"profile": "partial-rollout"})
    contest = contest_of("colocate", ["partial-rollout"], groups=64, workload=made)
    for profile in ("colocate", "partial-rollout"):
        (tmp_path / "runs" / f"{profile}-s0").mkdir(parents=True)
    compared = compare(contest, tmp_path, Quiet())
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == [f"{name}-s0" for name in ended]
    assert [result.profile for result in compared.results] == ended
    assert compared.missing == (() if len(ended) == 2 else ("SIMULATED partial-rollout-s0",))
    assert compared.remarks[-1:] == remarks_of(made, [COLOCATE_FIT])
    assert isinstance(compared.error, Interrupted)
    assert not compared.outlooks


def test_an_interrupt_before_a_run_of_the_baseline_has_ended_compares_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_after(monkeypatch, ["partial-rollout"])
    contest = contest_of("colocate", ["partial-rollout"], groups=64, workload=workload())
    (tmp_path / "runs").mkdir()
    with pytest.raises(Interrupted, match="no run of colocate had ended"):
        compare(contest, tmp_path, Quiet())
    assert not list(tmp_path.iterdir())


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


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_simulation_with_that_reason() -> None:
    with pytest.raises(AsyncrlError, match="a process of the simulation was killed"), simulators() as pool:
        pool.submit(signal.raise_signal, signal.SIGKILL).result()


PARENT = """
import os, time
from asyncrl_cli.bench.simulated_runs import simulators
if __name__ == "__main__":
    with simulators() as pool:
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
