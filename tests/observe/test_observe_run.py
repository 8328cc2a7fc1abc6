"""Whole runs of the real loop on simulated workers, watched by real observers and their files."""

import asyncio
import json
from dataclasses import replace

import pytest

from asyncrl_cli.loop.pipeline import Pipeline
from asyncrl_cli.loop.run_state import World
from asyncrl_cli.observe.observers import Observers
from asyncrl_cli.observe.render import render
from asyncrl_cli.observe.sinks import EventsFile, MetricsFile, StatusFile
from asyncrl_cli.simulate.simulated_trainer import SimulatedTrainer, TrainerTimes
from asyncrl_cli.simulate.simulated_worker import SimulatedWorker
from asyncrl_cli.simulate.world import NumberedFeed, run_virtual
from tests.loop.worlds import MODES, settings, worker_times
from tests.statuses import status_of

GATHER_S = 0.1


def watched_run(mode, facts, tmp_path):
    """Runs to the end; returns the metrics lines, the event lines and the last status."""
    loop_settings = settings(mode)
    schedule = loop_settings.schedule
    facts = replace(
        facts,
        mode=mode,
        train_steps=schedule.train_steps,
        step_groups=schedule.step_groups,
        window_groups=schedule.window_groups,
        trigger_parameter_sync_step=schedule.window_steps,
        max_staleness=schedule.max_staleness,
    )

    async def main():
        times = worker_times(load_s=lambda rng: 0.1)
        sinks = [
            MetricsFile(tmp_path / "m.jsonl"),
            EventsFile(tmp_path / "e.jsonl"),
            StatusFile(tmp_path / "s.json"),
        ]
        observers = Observers(facts, sinks)
        world = World(
            feed=NumberedFeed(),
            trainer=SimulatedTrainer(
                TrainerTimes(train_s=lambda batch: 0.7, gather_s=GATHER_S, publish_s=0.05)
            ),
            workers=[SimulatedWorker(f"rollout-{i}", 8, times, seed=0) for i in range(2)],
            eval_sets={"": [{"uid": f"e{index}", "prompt": str(index)} for index in range(20)]},
            observers=[observers],
        )
        began_s = asyncio.get_running_loop().time()
        await Pipeline(loop_settings, world).run()
        elapsed_s = asyncio.get_running_loop().time() - began_s
        observers.close("done")
        return elapsed_s

    elapsed_s = run_virtual(main())
    lines, events = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("m.jsonl", "e.jsonl")
    )
    return lines, events, json.loads((tmp_path / "s.json").read_text()), elapsed_s


@pytest.mark.parametrize("mode", MODES)
def test_the_files_of_a_run_agree_with_one_another(mode, facts, tmp_path):
    lines, events, status, elapsed_s = watched_run(mode, facts, tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert lines[-1]["ledger/trained"] == 48 == sum(event["event"] == "trained" for event in events)
    # The first weights are gathered before the first step begins: in the run's time, in no step's.
    assert sum(line["timing/step_s"] for line in lines) == pytest.approx(
        lines[-1]["time_s"] - GATHER_S, abs=0.01
    )
    assert lines[-1]["time_s"] == pytest.approx(elapsed_s, abs=0.01)
    for line in lines:
        parts = [value for key, value in line.items() if key.startswith("timing/") and key != "timing/step_s"]
        assert sum(parts) == pytest.approx(line["timing/step_s"])
        assert sum(line["staleness/histogram"]) == 8
        for key in (
            "trainer/idle_ratio",
            "rollouter/idle_ratio",
            "rollouter/slot_utilization",
            "overlap_ratio",
        ):
            # A worker at rest reports once a second: a shorter step may have nothing of it, and the next has
            # both.
            assert 0 <= line.get(key, 0) <= 1 + 1e-9
    assert {"trainer/idle_ratio", "rollouter/idle_ratio", "overlap_ratio"} <= status["totals"].keys()
    assert next(event["version"] for event in events if event["event"] == "eval") == 0
    assert status["phase"] == "done"
    assert status["totals"]["staleness/max"] <= status["max_staleness"]
    assert "12/12" in render(status_of(**status), width=100, height=30).plain


@pytest.mark.slow
def test_stale_counts_and_idle_times_of_a_run_tell_its_mode(facts, tmp_path):
    totals = {}
    for mode in MODES:
        directory = tmp_path / mode
        directory.mkdir()
        lines, _, status, _ = watched_run(mode, facts, directory)
        totals[mode] = status["totals"] | {"stale": lines[-1]["fully_async/count/stale_trajectory_processed"]}
    for mode in ("on-policy-pipeline", "stream-off-policy", "colocate"):
        assert (totals[mode]["staleness/max"], totals[mode]["stale"]) == (0, 0)
    for mode in ("stale-samples", "one-step-off"):
        assert totals[mode]["stale"] > 0
        assert totals[mode]["fully_async/partial/max_partial_span"] == 0
    assert totals["partial-rollout"]["fully_async/partial/max_partial_span"] >= 1
    assert totals["colocate"]["overlap_ratio"] == pytest.approx(0, abs=1e-6)
    assert totals["one-step-off"]["overlap_ratio"] > totals["on-policy-pipeline"]["overlap_ratio"]


def test_a_checkpoint_counts_a_step_whose_line_comes_later(facts, make):
    """As the last one does: it is written before the final eval, which the line has. The line itself is none
    the worse for it."""

    async def main():
        t, group, record = make["trajectory"], make["group"], make["record"]
        first, last = (
            record(step, step, [group("a", t(1.0, (0, 4)), t(0.5, (0, 2), (1, 3)))]) for step in (1, 2)
        )
        once, twice = Observers(facts, []), Observers(facts, [])
        for observers in (once, twice):
            observers.step(first)
            observers.tick(make["full_overview"](make["full_record"](1)))
        early = once.state(last)
        assert once.state() != early
        for observers in (once, twice):
            observers.step(last)
        assert once.state() == early == twice.state()

    run_virtual(main())
