"""What the screen and `asyncrl status` say of a run with steps of seconds, against its metrics.jsonl over the
same time."""

from __future__ import annotations

import asyncio
import functools
import json
import re
from dataclasses import dataclass, replace

import pytest

from asyncrl_cli.base.errors import Interrupted
from asyncrl_cli.loop.pipeline import Pipeline
from asyncrl_cli.loop.run_state import World
from asyncrl_cli.observe.format import summary_rows
from asyncrl_cli.observe.observers import Observers
from asyncrl_cli.observe.render import render
from asyncrl_cli.observe.sinks import Sink, to_json
from asyncrl_cli.simulate.simulated_trainer import SimulatedTrainer, TrainerTimes
from asyncrl_cli.simulate.world import NumberedFeed, run_virtual
from tests.loop.proof.faults import Fault, FaultKind, Faults, FaultyWorker
from tests.loop.proof.memory import MemoryCheckpoints, resume_from
from tests.loop.worlds import MODES, settings, worker_times
from tests.statuses import status_of

SHARES = ("trainer/idle_ratio", "rollouter/idle_ratio", "rollouter/slot_utilization")
RATES = ("rollouter/tokens_per_s", "trainer/tokens_per_s")
REPORT_AGE_S = 1.0
"""A worker at rest reports once a second: so much of its time may be in the next line."""


class PartialResponse(Sink):
    """Everything that the files and the screen would get."""

    def __init__(self) -> None:
        self.lines, self.statuses = [], []

    def line(self, line) -> None:
        self.lines.append(dict(line))

    def status(self, status) -> None:
        self.statuses.append(json.loads(to_json(status.to_json())))

    close = status


@dataclass
class Watched:
    lines: list
    statuses: list
    snapshots: list

    def live(self):
        """After the first line, before the end."""
        return [
            status
            for status in self.statuses
            if status["periods"]["steps"] and status["phase"] in ("running", "evaluating")
        ]


def watched_run(
    facts,
    mode="partial-rollout",
    *,
    train_s=1.6,
    train_steps=30,
    stop_at_s=None,
    resume_from=None,
    evals=64,
    faults=None,
):
    """Steps of about 5 s: most of it is waiting for responses with a long tail."""
    loop_settings = settings(mode, train_steps=train_steps, checkpoint_every_steps=5, max_restarts=1)
    schedule = loop_settings.schedule
    facts = replace(
        facts,
        mode=mode,
        train_steps=train_steps,
        step_groups=4,
        window_groups=schedule.window_groups,
        trigger_parameter_sync_step=schedule.window_steps,
        max_staleness=schedule.max_staleness,
    )

    async def main():
        kept, checkpoints = PartialResponse(), MemoryCheckpoints(write_s=0.4)
        observers, times = Observers(facts, [kept]), worker_times(token_s=0.1, restart_s=lambda rng: 4.0)
        world = World(
            feed=NumberedFeed(),
            trainer=SimulatedTrainer(
                TrainerTimes(train_s=lambda batch: train_s, gather_s=0.1, publish_s=0.05)
            ),
            workers=[FaultyWorker(f"rollout-{i}", 4, times, 0, faults=faults or Faults()) for i in range(2)],
            eval_sets={"": [{"uid": f"e{index}", "prompt": str(index)} for index in range(evals)]},
            observers=[observers],
            checkpoints=checkpoints,
            resume_from=resume_from,
        )
        pipeline, phase = Pipeline(loop_settings, world), "done"
        if stop_at_s is not None:
            asyncio.get_running_loop().call_later(stop_at_s, pipeline.request_stop)
        try:
            await pipeline.run()
        except Interrupted:
            phase = "stopped"
        observers.close(phase)
        return Watched(kept.lines, kept.statuses, checkpoints.snapshots)

    return run_virtual(main())


@functools.cache
def usual_run(facts, mode):
    """One for all tests that only look at it."""
    return watched_run(facts, mode)


def joined(lines, key):
    """The line's figure, weighted by how long its step took: an hourly wage is not the mean of daily ones."""
    measured = [(line[key], line["timing/step_s"]) for line in lines if key in line]
    return sum(value * seconds for value, seconds in measured) / sum(seconds for _, seconds in measured)


def within(lines, period):
    return [line for line in lines if period["from_s"] + 1e-6 < line["time_s"] <= period["to_s"] + 1e-6]


def assert_agrees(status, lines):
    period, use = status["periods"]["utilization"], status["utilization"]
    covered = within(lines, period)
    assert len(covered) == period["steps"]
    late = REPORT_AGE_S / (period["to_s"] - period["from_s"])
    for key in SHARES:
        expected = pytest.approx(joined(covered, key), abs=0.025 + late)
        assert use[key.replace("/", "_")] == expected, (key, period)
    for key in RATES:
        expected = pytest.approx(joined(covered, key), rel=0.05 + 4 * late)
        assert use[key.replace("/", "_")] == expected, (key, period)
    for executor in status["executors"]:
        if executor["role"] == "trainer":
            idle_s = sum(seconds for state, seconds in executor["state_s"].items() if state != "busy")
            share = idle_s / sum(executor["state_s"].values())
            assert share == pytest.approx(use["trainer_idle_ratio"], abs=1e-3)
    step_s = sum(line["timing/step_s"] for line in covered) / len(covered)
    assert status["timing"]["step_s"] == pytest.approx(step_s)
    assert status["staleness"]["max"] == max(line["staleness/max"] for line in covered)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_recent_and_whole_run_figures_agree_with_metrics_jsonl_over_the_same_time(mode, facts):
    ran = usual_run(facts, mode)
    assert 3 < sum(line["timing/step_s"] for line in ran.lines) / len(ran.lines) < 15
    recent = [status for status in ran.live() if status["periods"]["utilization"]["steps"]]
    assert len(recent) > 60
    for status in recent:
        period = status["periods"]["utilization"]
        assert_agrees(status, ran.lines)
        now_s = status["progress"]["time_s"]
        last_s = max(line["time_s"] for line in ran.lines if line["time_s"] < now_s - 1e-6)
        assert last_s <= period["to_s"] <= now_s
        is_a_minute = period["to_s"] - period["from_s"] > 60 - 1e-6
        began_s = ran.lines[0]["time_s"] - ran.lines[0]["timing/step_s"]
        assert is_a_minute or period["from_s"] == pytest.approx(began_s)
        steps = "last step" if period["steps"] == 1 else f"last {period['steps']} steps"
        assert re.fullmatch(rf"{steps}, [\d.:]+( s)?", period["words"])
    ended = ran.statuses[-1]
    assert ended["periods"]["utilization"]["words"].startswith("whole run, 30 steps, ")
    assert ended["periods"]["steps"]["to_s"] == ran.lines[-1]["time_s"]
    assert_agrees(ended, ran.lines)
    for key in (*SHARES, *RATES):
        assert ended["totals"][key] == ended["utilization"][key.replace("/", "_")]


def test_the_trainer_is_busy_exactly_while_groups_are_in_training(facts):
    for status in usual_run(facts, "partial-rollout").statuses:
        states = [executor["state"] for executor in status["executors"] if executor["role"] == "trainer"]
        if states and status["phase"] == "running":
            assert (states == ["busy"]) == (status["ledger"]["training"] > 0)


def test_a_step_longer_than_the_recent_ones_is_shown_for_itself_and_says_so(facts):
    ran = usual_run(facts, "partial-rollout")
    alone = [status for status in ran.live() if not status["periods"]["utilization"]["steps"]]
    assert len(alone) > 10
    for status in alone:
        period, steps = status["periods"]["utilization"], status["periods"]["steps"]
        now_s = status["progress"]["time_s"]
        assert period["words"].startswith("this step so far, ")
        assert (period["from_s"], period["to_s"]) == (steps["to_s"], now_s)
        assert now_s - period["from_s"] > steps["to_s"] - steps["from_s"]
        assert "trainer_tokens_per_s" not in status["utilization"], "they are counted when a step ends"
        assert not within(ran.lines, {**period, "to_s": now_s - 1e-3})
        line = next(line for line in ran.lines if line["time_s"] >= now_s)
        left_s = line["time_s"] - now_s
        idle_s = line["trainer/idle_ratio"] * line["timing/step_s"]
        shown_s = status["utilization"]["trainer_idle_ratio"] * (now_s - period["from_s"])
        assert shown_s == pytest.approx(idle_s, abs=left_s + 2 * REPORT_AGE_S)


@pytest.mark.slow
def test_after_a_resume_recent_figures_are_of_this_attempt_and_the_end_is_of_the_whole_run(facts):
    first = watched_run(facts, stop_at_s=100.0)
    stopped = first.statuses[-1]
    assert stopped["phase"] == "stopped"
    words = stopped["periods"]["utilization"]["words"]
    assert words.startswith(f"whole run, {len(first.lines)} steps")
    snapshot, state = first.snapshots[-1]
    second = watched_run(facts, resume_from=resume_from(snapshot, state))
    assert second.lines[0]["step"] == len(first.lines) + 1
    early = [status for status in second.statuses if not status["periods"]["steps"] and status["executors"]]
    assert early, "before the first line nothing of the last attempt is shown as if it were now"
    for status in second.live():
        assert status["periods"]["steps"]["from_s"] >= first.lines[-1]["time_s"]
        if status["periods"]["utilization"]["steps"]:
            assert_agrees(status, second.lines)
    ended = second.statuses[-1]
    assert ended["periods"]["steps"]["steps"] == 30
    both = [*first.lines, *second.lines]
    late = 3 * REPORT_AGE_S / ended["periods"]["steps"]["to_s"]
    for key in SHARES:
        shown = ended["utilization"][key.replace("/", "_")]
        assert shown == ended["totals"][key] == pytest.approx(joined(both, key), abs=0.01 + 2 * late)


def test_the_screen_and_the_summary_of_an_ended_run_say_the_same_of_the_same_time(facts):
    ended = usual_run(facts, "partial-rollout").statuses[-1]
    status = status_of(**ended)
    picture, use = render(status, width=100, height=40).plain, ended["utilization"]
    idle, slots = f"{use['trainer_idle_ratio']:.0%}", f"{use['rollouter_slot_utilization']:.0%}"
    assert re.search(rf"^trainer +idle +{idle} ", picture, re.MULTILINE)
    assert re.search(rf"^slots used +{slots} ", picture, re.MULTILINE)
    whole_run = dict(summary_rows(status))["whole run"]
    assert whole_run.startswith(f"slots used {slots}, ")
    assert f"trainer idle {idle}, " in whole_run
    assert picture.count(ended["periods"]["steps"]["words"]) == 2


@pytest.mark.slow
def test_the_time_left_has_room_for_the_final_eval(facts):
    ran = watched_run(facts, mode="one-step-off", evals=200)
    last = [
        status for status in ran.statuses if status["phase"] == "running" and status["progress"]["step"] == 29
    ][-1]
    ended_s = ran.lines[-1]["time_s"]
    begun_s = next(status for status in ran.statuses if status["phase"] == "evaluating")["progress"]["time_s"]
    assert ended_s - begun_s > 20
    assert last["progress"]["eta_s"] > (ended_s - begun_s) / 2


def test_what_was_not_measured_is_left_out_or_a_dash_and_never_a_zero(facts):
    fresh = Observers(facts, [], clock=lambda: 0.0).live.picture().to_json()
    assert fresh["tokens_discarded"] is None
    assert not fresh["utilization"].keys() - {"slot_history"}
    assert len(render(status_of(doing="warm start"), width=100, height=40).plain.splitlines()) == 3
    trainer = {"name": "trainer", "role": "trainer", "state": "starved", "waiting_for": ""}
    trainer |= {"state_s": {}, "gauges": {}}
    text = render(status_of(executors=[trainer]), width=100, height=40).plain
    for row in ("slots used    - ", "rollouter  idle    -        - tokens/s", "trainer    idle    -"):
        assert row in text
    assert not re.search("^(staleness|reward|eval|mean step)", text, re.MULTILINE)
    assert not re.search(r"\b0%(?!  0:00:00 elapsed)", text.replace("step 0/300", ""))


def test_figures_that_are_not_finite_are_shown_by_name(facts, make):
    observers = Observers(facts, [], clock=lambda: 1.0)
    made = make["full_record"](1)
    observers.step(replace(made, sync={**made.sync, "logprob_abs_diff": float("nan")}))
    observers.tick(make["full_overview"](made))
    status = observers.live.picture().to_json()
    reward = status["reward"] | {"mean": float("nan"), "history": [float("nan"), 0.5, float("inf")]}
    text = render(status_of(**status | {"reward": reward}), width=100, height=40).plain
    assert "|logprob diff| nan" in text
    assert "reward     nan last step ▄" in text


@pytest.mark.slow
def test_every_status_that_is_written_can_be_read_back(facts):
    """By `asyncrl status`, which holds it against its type: also while a worker is restarted, and before
    anything was measured."""
    deaths = Faults([Fault(kind=FaultKind.WORKER_DIES, executor="rollout-1", at_s=9.0)])
    statuses = watched_run(facts, faults=deaths).statuses
    assert any(status["restarting"] == {"rollout-1": "1 of 1"} for status in statuses)
    assert statuses[0]["tokens_discarded"] is None
    for status in statuses:
        assert to_json(status_of(**status).to_json()) == to_json(status)


def test_a_period_begins_where_the_line_before_it_ends(facts, make):
    """The run's time is told anew with every tick, and a little later each time: as much as the driver is
    late."""
    now_s, kept = [0.0], PartialResponse()
    observers = Observers(facts, [kept], clock=lambda: now_s[0])
    for step in range(1, 31):
        now_s[0] = 5.0 * step
        made = make["full_record"](step)
        observers.step(replace(made, ended_s=now_s[0], timing_s=dict(made.timing_s) | {"step": 5.0}))
        now_s[0] += 0.01
        observers.tick(replace(make["full_overview"](made), time_s=5.0 * step + 0.02 * step))
        period = kept.statuses[-1]["periods"]["steps"]
        covered = [line for line in kept.lines if period["from_s"] < line["time_s"] <= period["to_s"]]
        assert len(covered) == period["steps"]
