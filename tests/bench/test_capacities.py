"""What real runs' bounds rest on: one measurement per profile, on the lengths of the measured stretch, and its doubts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl_cli.bench import phases
from asyncrl_cli.bench.capacities import doubts_of, measured_lengths, real_capacities
from asyncrl_cli.bench.compare import Request, real_entries
from asyncrl_cli.bench.results import RunLines
from asyncrl_cli.job import preparing
from asyncrl_cli.observe.bound import Capacities

SETS = ("placement.device=cpu",)


class Quiet:
    def run(self, name: str, groups: int, total: int, told: Any = None) -> None: ...

    def note(self, text: str, done: int, total: int) -> None: ...

    def say(self, text: str) -> None: ...


def run_of(profile: str, seed: int, lengths: tuple[int, ...], window_groups: int) -> RunLines:
    """A window per length, one step each; a step's 40 responses are all that long."""
    lines = [
        {
            "window": window,
            "groups_trained": window_groups * (window + 1),
            "time_s": float(window + 1),
            "response_tokens/quantiles": [length] * 41,
        }
        for window, length in enumerate(lengths)
    ]
    return RunLines(profile=profile, seed=seed, lines=lines)


def test_lengths_are_those_of_the_measured_stretch_of_all_runs() -> None:
    """W = 4 and W = 8, 24 groups: warm-up and run-out are 8 groups each, two windows of the one and one of the other."""
    runs = [run_of("short", 0, (1, 2, 30, 40, 5, 6), 4), run_of("long", 0, (7, 80, 9), 8)]
    assert sorted(measured_lengths(runs, 8)) == [30] * 40 + [40] * 40 + [80] * 40


def test_lengths_are_in_an_order_that_is_the_same_each_time_and_not_that_of_the_runs() -> None:
    runs = [run_of("one", seed, (1, 10 * seed + 10, 1), 4) for seed in range(4)]
    lengths = measured_lengths(runs, 4)
    assert lengths == measured_lengths(runs, 4)
    assert set(lengths[:40]) == {10, 20, 30, 40}


def measured(**changed: Any) -> phases.PhaseFigures:
    made = phases.PhaseFigures(
        rollout_tokens_per_s=100.0,
        trainer_tokens_per_s=50.0,
        rollout_repeats=(100.0,),
        trainer_repeats=(50.0,),
        colocated=False,
        rollout_workers=1,
        rollout_threads=1,
        slots=64,
        trainer_workers=1,
        trainer_threads=1,
        slots_used=1.0,
        cpu_share=1.0,
        seconds_measured=4.0,
    )
    return replace(made, **changed)


def test_a_profile_is_measured_once_for_all_of_its_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    entries, _ = real_entries(Request(baseline="colocate", profiles=("partial-rollout",), sets=SETS))
    asked: list[dict[str, Any]] = []

    async def prepare(profile: object, say: object) -> SimpleNamespace:
        return SimpleNamespace(model_dir=Path("model"), task="task")

    def measure_all(profiles: dict[str, Any], model_dir: Path, task: str, **rest: Any) -> dict[str, phases.PhaseFigures]:
        asked.append({"profiles": list(profiles), "model_dir": model_dir, "task": task, **rest})
        return {"colocate": measured(colocated=True), "partial-rollout": measured(rollout_tokens_per_s=70.0)}

    monkeypatch.setattr(preparing, "prepare", prepare)
    monkeypatch.setattr(phases, "measure_all", measure_all)
    runs = [run_of(name, seed, (1, 20, 3), 96) for seed in (4, 5) for name in ("colocate", "partial-rollout")]
    capacities, remarks = real_capacities(entries, runs, Quiet())
    apart = Capacities(rollout_tokens_per_s=70.0, trainer_tokens_per_s=50.0, colocated=False)
    together = Capacities(rollout_tokens_per_s=100.0, trainer_tokens_per_s=50.0, colocated=True)
    assert capacities == {
        ("colocate", 4): together,
        ("colocate", 5): together,
        ("partial-rollout", 4): apart,
        ("partial-rollout", 5): apart,
    }
    assert remarks == ()
    assert len(asked) == 1
    assert (asked[0]["model_dir"], asked[0]["task"], asked[0]["response_tokens"]) == (Path("model"), "task", [20] * 160)


def test_on_gpus_the_bound_is_not_measured_and_that_is_said() -> None:
    entries, _ = real_entries(Request(baseline="colocate", profiles=("partial-rollout",), sets=SETS))
    on_gpus = [replace(entry, plan=replace(entry.plan, device="cuda")) for entry in entries]
    capacities, remarks = real_capacities(on_gpus, [run_of("colocate", 0, (1, 2, 3), 96)], Quiet())
    assert capacities == {}
    assert len(remarks) == 1
    assert remarks[0].startswith("bound not measured: ")


def test_a_machine_that_others_use_and_slots_that_are_not_full_make_the_bound_uncertain() -> None:
    assert doubts_of([measured(), measured(cpu_share=0.9, slots_used=0.95)]) == ()
    (doubt,) = doubts_of([measured(), measured(cpu_share=0.5)])
    assert "something else computed on this machine" in doubt
    (doubt,) = doubts_of([measured(slots_used=0.5), measured()])
    assert "slots were not full" in doubt
