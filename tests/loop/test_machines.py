"""The eight machines of the pipeline in runs on the virtual clock: each is in one state at any time, and its
times are those of the simulated costs."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict

import pytest

from asyncrl_cli.measure.machines import MACHINES, machine_of
from asyncrl_cli.measure.meters import MACHINES_EVERY_S, MeteredRewards, RolloutMeter
from asyncrl_cli.measure.states import ExecutorReport, State
from asyncrl_cli.simulate.sequences import ToolWait
from asyncrl_cli.simulate.world import run_virtual
from tests.loop.worlds import Ran, run_world, settings

STEPS, VERSIONS = 12, 7
LOGP_S, REF_S, TRAIN_S, GATHER_S, PUBLISH_S = 0.2, 0.3, 0.7, 0.1, 0.05
WITHOUT_A_SANDBOX = [name for name in MACHINES if name != "reward"]


def reports_of(ran: Ran) -> dict[str, list[ExecutorReport]]:
    found = defaultdict(list)
    for report in ran.pipeline.state.executors.reports.latest.values():
        found[machine_of(report.name, report.role)].append(report)
    return found


@pytest.fixture(scope="module")
def ran() -> Ran:
    """The trainer computes logp and ref_logp itself. A version is published every second step."""
    columns = {"old_logprob": lambda batch: LOGP_S, "ref": lambda batch: REF_S}
    return run_world(
        settings("partial-rollout", train_steps=STEPS),
        times={"reward_s": lambda rng: 0.5},
        trainer_times={"column_s": columns},
    )


@pytest.mark.parametrize("machine", WITHOUT_A_SANDBOX)
def test_the_states_of_a_machine_add_up_to_the_elapsed_time(ran, machine):
    reports = reports_of(ran)[machine]
    assert reports
    for report in reports:
        assert report.now_s > ran.elapsed_s - 1.5
        assert sum(report.state_s.values()) == pytest.approx(report.now_s)


def test_a_trainer_that_computes_columns_within_its_step_is_shown_to_be_scoring(ran):
    in_step = [tick.reports["trainer-0"] for tick in ran.recorder.ticks if tick.ledger["training"]]
    states = Counter(report.state for report in in_step)
    assert set(states) == {State.BUSY, State.SCORING}
    assert not any(report.waiting_for for report in in_step)


def test_rewards_that_overlap_are_one_time_at_work_and_the_states_add_up() -> None:
    async def main() -> ExecutorReport:
        loop = asyncio.get_running_loop()

        async def score(item: object, text: str) -> float:
            await asyncio.sleep(float(text))
            return 1.0

        rewards = MeteredRewards("reward-0", score, loop.time)
        await asyncio.sleep(1.0)
        await asyncio.gather(rewards.score({}, "2"), rewards.score({}, "3"))
        await asyncio.sleep(4.0)
        return rewards.report()

    report = run_virtual(main())
    assert machine_of(report.name, report.role) == "reward"
    assert report.state_s == pytest.approx({State.STARVED: 5.0, State.BUSY: 3.0})


def test_logp_ref_logp_and_train_are_apart_in_one_process(ran):
    spent_s = {name: reports[0].state_s for name, reports in reports_of(ran).items()}
    assert spent_s["logp"][State.BUSY] == pytest.approx(STEPS * LOGP_S)
    assert spent_s["ref_logp"][State.BUSY] == pytest.approx(STEPS * REF_S)
    assert spent_s["train"][State.BUSY] == pytest.approx(STEPS * TRAIN_S)
    assert spent_s["train"][State.SCORING] == pytest.approx(STEPS * (LOGP_S + REF_S))
    assert spent_s["train"][State.SYNCING] == pytest.approx(VERSIONS * GATHER_S)


def test_param_update_gathers_and_sends_in_the_trainer_and_receives_and_loads_in_each_worker(ran):
    updates = {report.name: report.state_s for report in reports_of(ran)["param_update"]}
    trainers = updates.pop("param_update-trainer-0")
    assert trainers[State.SYNCING] == pytest.approx(VERSIONS * GATHER_S)
    assert trainers[State.SENDING] == pytest.approx(VERSIONS * PUBLISH_S, abs=PUBLISH_S)
    assert updates.keys() == {"param_update-rollout-0", "param_update-rollout-1"}
    for name, state_s in updates.items():
        loads = [event for event in ran.recorder.named("loaded") if name.endswith(event.fields["worker"])]
        for state, field in ((State.SENDING, "send_s"), (State.LOADING, "pause_s")):
            # the last load may end after the last report
            seconds = [event.fields[field] for event in loads]
            assert sum(seconds[:-1]) - 1e-6 <= state_s[state] <= sum(seconds) + 1e-6


def test_a_worker_whose_trajectories_all_wait_for_rewards_is_blocked_and_its_engine_starved(ran):
    found = reports_of(ran)
    for worker, engine in zip(found["rollout"], found["generate"], strict=True):
        assert worker.state_s[State.BLOCKED] > 1.0
        older_s = worker.now_s - engine.now_s
        assert 0 <= older_s < MACHINES_EVERY_S
        assert 0 <= worker.state_s[State.BUSY] - engine.state_s[State.BUSY] <= older_s
        idle_s = sum(worker.state_s.get(state, 0.0) for state in (State.BLOCKED, State.STARVED))
        assert 0 <= idle_s - engine.state_s[State.STARVED] + 1e-6 <= older_s + 2e-6


def test_a_workers_machines_are_reported_only_once_they_are_due() -> None:
    now_s = 0.0
    meter = RolloutMeter("rollout-0", 8, lambda: now_s, lambda: None)
    have_machines = []
    for now_s in (0.0, 0.9 * MACHINES_EVERY_S, MACHINES_EVERY_S):  # noqa: B007  (the meter's clock reads it)
        report = meter.report(version=0, sampled_tokens=0, decode_steps=0, running_tokens=0)
        have_machines.append(bool(report.machines))
    assert have_machines == [True, False, True]


def test_an_engine_is_starved_while_all_trajectories_wait_for_tools() -> None:
    calls = [ToolWait(3.0, 1, 5)]
    ran = run_world(
        settings("partial-rollout", train_steps=2), workers=1, times={"tool_calls": lambda rng, n: calls}
    )
    (worker,), (engine,) = reports_of(ran)["rollout"], reports_of(ran)["generate"]
    assert worker.state_s[State.WAITING] > 3.0
    assert State.WAITING not in engine.state_s
    assert engine.state_s[State.STARVED] >= worker.state_s[State.WAITING]


def test_a_machine_that_a_run_does_not_have_reports_nothing() -> None:
    assert {"logp", "ref_logp"}.isdisjoint(reports_of(run_world(settings("partial-rollout"))))
    apart = run_world(settings("partial-rollout"), group_score_s=0.1, scorer="ref")
    assert [report.role for report in reports_of(apart)["ref_logp"]] == ["scorer"]
