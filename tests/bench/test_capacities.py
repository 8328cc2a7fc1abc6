"""What real runs' bounds rest on: one measurement per profile, on the lengths of the measured stretch, and
its doubts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl_cli.bench import phases
from asyncrl_cli.bench.compare import contest_of
from asyncrl_cli.bench.entries import Entry
from asyncrl_cli.bench.phases import doubts_of, measured_lengths, with_capacities
from asyncrl_cli.bench.results import FinishedRun
from asyncrl_cli.job import preparing
from asyncrl_cli.simulate.capacities import Capacities

SETS = ("placement.device=cpu",)


class Quiet:
    def run(self, name: str, groups: int, total: int, **told: Any) -> None: ...

    def note(self, text: str, done: int, total: int) -> None: ...

    def say(self, text: str) -> None: ...


def entries(*sets: str) -> Sequence[Entry]:
    """Colocate, W = 16, and partial-rollout, W = 64, unless `sets` say otherwise."""
    return contest_of("colocate", ["partial-rollout"], sets=(*SETS, *sets)).entries


def run_of(profile: str, seed: int, lengths: tuple[int, ...], window_groups: int) -> FinishedRun:
    """A window per length, one step each; a step's 40 responses are all that long."""
    lines = [
        {
            "window": window,
            "groups_trained": window_groups * (window + 1),
            "time_s": float(window + 1),
            "response_tokens/quantiles": [length] * 41,
            "staleness/histogram": [40],
        }
        for window, length in enumerate(lengths)
    ]
    return FinishedRun(profile=profile, seed=seed, lines=lines)


def test_lengths_are_those_of_the_measured_stretch_of_all_runs() -> None:
    """W = 16 and W = 64, 192 groups: warm-up and run-out are 64 groups each, four windows of the one and one
    of the other."""
    short = run_of("colocate", 0, (1, 2, 3, 4, 20, 30, 40, 50, 5, 6, 7, 8), 16)
    lengths = measured_lengths(entries(), [short, run_of("partial-rollout", 0, (7, 80, 9), 64)])
    assert set(lengths) == {20, 30, 40, 50, 80}
    assert {lengths.count(tokens) / len(lengths) for tokens in lengths} == {0.2}


def test_lengths_are_in_an_order_that_is_the_same_each_time_and_not_that_of_the_runs() -> None:
    runs = [run_of("colocate", seed, (1, 10 * seed + 10, 1), 64) for seed in range(4)]
    lengths = measured_lengths(entries(), runs)
    assert lengths == measured_lengths(entries(), runs)
    assert set(lengths[:40]) == {10, 20, 30, 40}


APART = Capacities(rollout_tokens_per_s=70.0, trainer_tokens_per_s=50.0, colocated=False)
TOGETHER = Capacities(rollout_tokens_per_s=100.0, trainer_tokens_per_s=50.0, colocated=True)


def measured(
    capacities: Capacities = APART, *, slots_used: float = 1.0, cpu_share: float = 1.0
) -> phases.PhaseFigures:
    return phases.PhaseFigures(capacities=capacities, slots_used=slots_used, cpu_share=cpu_share)


def test_a_profile_is_measured_once_for_all_of_its_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    async def prepare(profile: object, say: object) -> tuple[SimpleNamespace, Path, dict[str, str]]:
        return SimpleNamespace(train=["items"], reward=None), Path("model"), {}

    def measure_all(
        sides: dict[str, Any], model_dir: Path, items: list[str], lengths: list[int], **rest: Any
    ) -> dict[str, phases.PhaseFigures]:
        asked.append({"sides": list(sides), "items": items, "lengths": set(lengths), **rest})
        return {"colocate": measured(TOGETHER), "partial-rollout": measured()}

    monkeypatch.setattr(preparing, "prepare", prepare)
    monkeypatch.setattr(phases, "measure_all", measure_all)
    runs = [run_of(name, seed, (1, 20, 3), 96) for seed in (4, 5) for name in ("colocate", "partial-rollout")]
    known, remarks = with_capacities(entries(), runs, Quiet())
    assert [(run.profile, run.seed, run.capacities) for run in known] == [
        (name, seed, TOGETHER if name == "colocate" else APART)
        for seed in (4, 5)
        for name in ("colocate", "partial-rollout")
    ]
    assert remarks == ()
    assert len(asked) == 1
    assert (asked[0]["sides"], asked[0]["items"], asked[0]["lengths"]) == (
        ["colocate", "partial-rollout"],
        ["items"],
        {20},
    )


def test_on_gpus_the_bound_is_not_measured_and_that_is_said() -> None:
    on_gpus = [replace(entry, plan=replace(entry.plan, device="cuda")) for entry in entries()]
    known, remarks = with_capacities(on_gpus, [run_of("colocate", 0, (1, 2, 3), 96)], Quiet())
    assert [run.capacities for run in known] == [None]
    assert len(remarks) == 1
    assert remarks[0].startswith("bound not measured: ")


def test_a_machine_that_others_use_and_slots_that_are_not_full_make_the_bound_uncertain() -> None:
    assert doubts_of([measured(), measured(cpu_share=0.9, slots_used=0.95)]) == ()
    (doubt,) = doubts_of([measured(), measured(cpu_share=0.5)])
    assert "something else computed on this machine" in doubt
    (doubt,) = doubts_of([measured(slots_used=0.5), measured()])
    assert "slots were not full" in doubt
