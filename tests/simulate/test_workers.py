"""The simulated worker: what its calls promise, what its meters say. (How it fails:
tests/loop.)"""

from __future__ import annotations

import asyncio
import random

import pytest

from asyncrl_cli.base.errors import ExecutorFailed
from asyncrl_cli.contracts.ports import EvalRequest, EvalTry
from asyncrl_cli.contracts.prompt_group import AttemptKey, PartKey, PartRequest
from asyncrl_cli.contracts.weight_version import Published
from asyncrl_cli.measure.states import State
from asyncrl_cli.simulate.responses import WorkerTimes
from asyncrl_cli.simulate.sequences import ToolWait
from asyncrl_cli.simulate.simulated_trainer import SharedMachine
from asyncrl_cli.simulate.simulated_worker import SimulatedWorker
from asyncrl_cli.simulate.workload import Decoding
from tests.loop.proof.faults import Fault, FaultKind, Faults, FaultyWorker
from tests.simulate.virtual import virtual


def lengths(*tokens):
    """Every group has these lengths."""
    return lambda rng, n: list(tokens)[:n]


def make(times=None, *, slots=4, name="rollout-0", faults=None, machine=None, **changes):
    values = {
        "decoding": Decoding(step_s=1.0, step_s_per_sequence=0.0),
        "response_tokens": lengths(3, 5),
    } | changes
    times = times or WorkerTimes(**values)
    if faults is None:
        return SimulatedWorker(name, slots, times, 0, machine)
    return FaultyWorker(name, slots, times, 0, faults=faults, machine=machine)


def group(number=0, n=2):
    """A part that is a whole group."""
    return part(number, 0, *range(n))


def part(group_number, number, *indices):
    key = PartKey(AttemptKey(f"p{group_number}", 0, 0), number)
    return PartRequest(key=key, item={}, indices=indices, seed=group_number)


async def ended(worker, *requests):
    """The results of what was submitted, each with the time at which it came."""
    came, seen = {}, 0
    while not came.keys() >= {request.key for request in requests}:
        update = await worker.next_update(seen)
        seen = update.seen
        came |= {result.key: (result, now_s()) for result in update.ended}
    return [came[request.key] for request in requests]


async def generate(worker, request):
    worker.submit(request)
    ((result, _),) = await ended(worker, request)
    return result


async def load(worker, version, interrupt="keep-kv"):
    await worker.prefetch(Published(version=version, num_bytes=0, publish_s=0.0, handle=None))
    return await worker.load(version, interrupt)


def now_s():
    return asyncio.get_running_loop().time()


async def timed(work):
    result = await work
    return result, now_s()


@virtual
async def test_a_group_ends_with_its_last_reward_and_its_slots_are_free_before():
    worker = make(reward_s=lambda rng: 2.0)
    await load(worker, 0)
    worker.submit(group())
    await asyncio.sleep(6)  # both have ended at 3 and 5 s, the last reward comes at 7 s
    update = await worker.next_update(0)
    ((result, ended_s),) = await ended(worker, group())
    assert ended_s == 7.0
    assert [meta.response_tokens for meta in result.trajectories] == [3, 5]
    assert {meta.version_tokens for meta in result.trajectories} == {((0, 3),), ((0, 5),)}
    assert update.freed_slots == {group().key: 2}
    (report,) = update.reports
    assert (report.gauges["running_sequences"], report.gauges["running_tokens"]) == (0, 8)
    assert report.sums["running_sequence_s"] == 3 + 5
    assert (report.sums["idle_s"], report.sums["sampled_tokens"]) == (1, 8)


@pytest.mark.parametrize(("hold_slots", "first_s", "second_s"), [(True, 13.0, 22.0), (False, 15.0, 12.0)])
@virtual
async def test_a_trajectory_at_a_tool_holds_its_slot_or_leaves_it_to_another(hold_slots, first_s, second_s):
    """One slot. The first makes 3 tokens, waits 7 s for a tool and makes 3 more. The second, of 9 tokens,
    gets the slot when the first has ended at 13 s; or at 3 s, and then the first is back at 10 s, goes on at
    12 s and ends at 15 s."""
    calls = {3: [ToolWait(7.0, 5, 3)], 9: []}
    worker = make(
        slots=1,
        response_tokens=lambda rng, n: [3] if rng.random() == random.Random(0).random() else [9],
        tool_calls=lambda rng, tokens: calls[tokens],
        hold_slots=hold_slots,
    )
    await load(worker, 0)
    worker.submit(part(0, 0, 0))
    worker.submit(part(1, 0, 0))
    await asyncio.sleep(5)
    update = await worker.next_update(0)
    (first, came_first_s), (_, came_second_s) = await ended(worker, part(0, 0, 0), part(1, 0, 0))
    assert (came_first_s, came_second_s) == pytest.approx((first_s, second_s), abs=0.2)
    (meta,) = first.trajectories
    assert (meta.num_turns, meta.tool_s, meta.prompt_tokens, meta.response_tokens) == (2, 7.0, 4 + 5, 6)
    assert update.freed_slots == ({} if hold_slots else {part(0, 0, 0).key: 1})
    (report,) = update.reports
    assert report.state is (State.WAITING if hold_slots else State.BUSY)
    assert report.waiting_for == ("a tool of p0@0.0/0 (2 s so far)" if hold_slots else "")
    assert report.sums["waiting_trajectory_s"] == pytest.approx(2.0)


@virtual
async def test_tools_that_fail_fail_their_trajectory_alone_and_a_drain_waits_for_those_that_go_on():
    tools = {3: [ToolWait(4.0, 0, 0, "tool-died")], 5: [ToolWait(20.0, 1, 2)]}
    worker = make(tool_calls=lambda rng, tokens: tools[tokens])
    await load(worker, 0)
    worker.submit(group())
    await asyncio.sleep(6)
    _, loaded_s = await timed(load(worker, 1, "drain"))
    ((result, ended_s),) = await ended(worker, group())
    assert [failure.kind for failure in result.failures] == ["tool-died"]
    assert [meta.version_tokens for meta in result.trajectories] == [((0, 7),)]
    assert result.failed_tokens == 3
    assert loaded_s == 5 + 20 + 2 <= ended_s


@pytest.mark.parametrize(("name", "before"), [("rollout-0", 0), ("rollout-5", 3)])
@virtual
async def test_a_response_has_the_same_length_on_any_worker_in_any_part_whatever_happened_before(
    name, before
):
    worker = make(name=name, response_tokens=lambda rng, n: [rng.randint(1, 99) for _ in range(n)])
    await load(worker, 0)
    for number in range(before):
        await generate(worker, group(number + 10))
    results = [await generate(worker, part(1, 0, 0, 2)), await generate(worker, part(1, 1, 1, 3))]
    rng = random.Random(1)
    expected = [rng.randint(1, 99) for _ in range(4)]
    found = [[meta.response_tokens for meta in result.trajectories] for result in results]
    assert found == [expected[::2], expected[1::2]]


@pytest.mark.parametrize(
    ("interrupt", "versions", "loaded_s", "ended_s"),
    [
        # Two tokens are done at 2 s; the load takes 4 s; recompute-kv fills in 10 + 2 tokens of each sequence
        # at 0.1 s.
        ("keep-kv", [((0, 2), (1, 1)), ((0, 2), (1, 3))], 6.0, 5 + 4.0),
        ("recompute-kv", [((0, 2), (1, 1)), ((0, 2), (1, 3))], 6.0, 5 + 4.0 + 2 * 12 * 0.1),
        ("drain", [((0, 3),), ((0, 5),)], 5 + 4.0, 5.0),
    ],
)
@virtual
async def test_a_load_freezes_recomputes_or_drains(interrupt, versions, loaded_s, ended_s):
    decoding = Decoding(step_s=1.0, step_s_per_sequence=0.0, prefill_s_per_token=0.1)
    worker = make(decoding=decoding, prompt_tokens=10, load_s=lambda rng: 3.0, pause_s=1.0)
    await load(worker, 0)
    worker.submit(group())
    begin_s = now_s() + 2 * 10 * 0.1  # after the prefill
    running = asyncio.create_task(ended(worker, group()))
    await asyncio.sleep(begin_s - now_s() + 2.0)
    report = await load(worker, 1, interrupt)
    assert now_s() - begin_s == pytest.approx(loaded_s)
    ((result, end_s),) = await running
    assert end_s - begin_s == pytest.approx(ended_s)
    assert [meta.version_tokens for meta in result.trajectories] == versions
    assert (report.load_s, report.pause_s) == (3.0, 4.0)
    assert (await worker.next_update(0)).reports[0].state_s["loading"] == pytest.approx(4.0 + 4.0)


@virtual
async def test_a_drain_lets_nobody_begin_before_the_load():
    worker = make(slots=2)
    await load(worker, 0)
    worker.submit(group(0))
    await asyncio.sleep(1)
    loading = asyncio.create_task(load(worker, 1, "drain"))
    await asyncio.sleep(1)
    worker.submit(group(1))
    results = await ended(worker, group(0), group(1))
    await loading
    versions = [meta.version_tokens for result, _ in results for meta in result.trajectories]
    assert versions == [((0, 3),), ((0, 5),), ((1, 3),), ((1, 5),)]


@virtual
async def test_the_parts_of_an_aborted_group_return_at_once_with_the_tokens_they_cost_and_free_their_slots():
    worker = make(slots=2)
    await load(worker, 0)
    worker.submit(part(0, 0, 0))
    worker.submit(part(0, 1, 1))
    worker.submit(group(1))
    results = asyncio.create_task(ended(worker, part(0, 0), part(0, 1), group(1)))
    await asyncio.sleep(3.5)
    await worker.abort(AttemptKey("p0", 0, 0))
    await worker.abort(AttemptKey("nobody's", 0, 0))
    (whole, _), (aborted, aborted_s), (_, second_s) = await results
    assert [meta.response_tokens for meta in whole.trajectories] == [3], "it had ended before"
    assert (aborted.trajectories, aborted.failures, aborted.failed_tokens, aborted_s) == ((), (), 3, 3.5)
    assert second_s == 3.5 + 5  # its first sequence began at 3 s, its second at 3.5 s


@virtual
async def test_evals_wait_for_slots_like_groups_and_can_be_aborted():
    worker = make(slots=2, response_tokens=lengths(4, 4), reward_s=lambda rng: 1.0)
    await load(worker, 0)
    worker.submit(group())
    tries = tuple(EvalTry({"uid": str(number)}) for number in range(5))
    running = asyncio.create_task(ended(worker, group()))
    answers = asyncio.create_task(timed(worker.evaluate(EvalRequest(version=0, tries=tries, seed=0))))
    await asyncio.sleep(10.5)  # two have their rewards at 9 s, two more run from 8 s, one waits
    await worker.abort_evals()
    ((_, group_s),), (result, eval_s) = await running, await answers
    assert (group_s, eval_s) == (5.0, 10.5)
    assert [outcome.response_tokens for outcome in result.outcomes[:2]] == [4, 4]
    assert [failure.kind for failure in result.outcomes[2:]] == ["aborted"] * 3
    assert (await worker.next_update(0)).reports[0].sums["eval_s"] == 10.5


@virtual
async def test_progress_comes_at_a_change_but_not_more_often_than_allowed_and_after_a_while_anyway():
    worker = make(response_tokens=lengths(3, 5), progress_s=4.0, poll_s=30.0)
    await load(worker, 0)
    seen, times = (await worker.next_update(0)).seen, []
    worker.submit(part(0, 0, 0))
    worker.submit(part(0, 1, 1))
    for _ in range(4):
        seen = (await worker.next_update(seen)).seen
        times.append(now_s())
    # Changes: busy at 0 s; ends at 3 and 5 s. Reports: 4 s after the first at 0; at once when nothing runs
    # any more; then at rest, 30 s later each.
    assert times == [4.0, 5.0, 35.0, 65.0]


@virtual
async def test_a_share_of_rewards_raises():
    worker = make(slots=64, response_tokens=lambda rng, n: [1] * n, failure_ratio=0.3)
    await load(worker, 0)
    results = [await generate(worker, group(number, n=50)) for number in range(20)]
    failed = sum(len(result.failures) for result in results)
    assert 240 < failed < 360
    assert all(len(result.failures) + len(result.trajectories) == 50 for result in results)
    assert sum(result.failed_tokens for result in results) == failed


async def follow(worker):
    seen = 0
    while True:
        seen = (await worker.next_update(seen)).seen


@virtual
async def test_a_restarted_worker_is_a_fresh_one_that_what_was_on_its_way_to_the_old_one_does_not_reach():
    faults = [
        Fault(kind=FaultKind.REPEATED_PREFETCH, executor="rollout-0", nth=2, seconds=30.0),
        Fault(kind=FaultKind.WORKER_DIES, executor="rollout-0", at_s=5.0),
        Fault(kind=FaultKind.WORKER_DIES, executor="rollout-0", at_s=60.0),
    ]
    machine = SharedMachine(cores=1)
    worker = make(
        faults=Faults(faults),
        machine=machine,
        restart_s=lambda rng: 4.0,
        reward_s=lambda rng: 9.0,
        response_tokens=lengths(2, 90),
    )
    await load(worker, 0)
    await load(worker, 1)
    worker.submit(group())
    with pytest.raises(ExecutorFailed, match="death at 5 s"):
        await follow(worker)
    await asyncio.sleep(1.0)
    await worker.restart()
    assert (now_s(), worker.version) == (10.0, -1)
    report = (await worker.next_update(0)).reports[0]
    sums, running = report.sums, report.gauges["running_sequences"]
    assert (sums["idle_s"], sums["running_sequence_s"], running) == (5.0, 0.0, 0)
    assert await machine.compute(1.0) == 1.0, "the old engine still slows the machine down"
    await load(worker, 0)
    await asyncio.sleep(30.0)
    with pytest.raises(AssertionError, match="has received 0"):
        await worker.load(1, "keep-kv")
    with pytest.raises(ExecutorFailed, match="death at 60 s"):
        await generate(worker, group(1))


@virtual
async def test_on_a_shared_machine_trainer_and_workers_slow_each_other_down():
    """4 tokens alone. Then a worker and two ranks share two cores: 6 more tokens at 1.5 s, until 13 s, by
    when the ranks have done 6 of their 7 s."""
    machine = SharedMachine(cores=2)
    worker = make(machine=machine, response_tokens=lengths(10, 10))
    await load(worker, 0)
    worker.submit(group())
    running = asyncio.create_task(ended(worker, group()))
    await asyncio.sleep(4)
    assert await machine.compute(7.0, processes=2) == pytest.approx(9 + 1)
    assert (await running)[0][1] == pytest.approx(4 + 6 * 1.5)


@virtual
async def test_workers_differ_in_speed_as_much_as_asked():
    uneven = Decoding(step_s=1.0, step_s_per_sequence=0.0, speed_spread=0.2)
    speeds = [make(name=f"rollout-{number}", decoding=uneven).speed for number in range(200)]
    assert 0.8 <= min(speeds) < 0.82
    assert 1.18 < max(speeds) <= 1.2
