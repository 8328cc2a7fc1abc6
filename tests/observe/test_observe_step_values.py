"""Overlap of busy intervals, compared with counting points on a grid."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.measure.states import Span, State
from asyncrl_cli.observe.step_values import episode_values, filter_values, overlap, reward_values, utilization
from tests.observe.conftest import group, report, trajectory

INTERVALS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda pair: (pair[0], pair[0] + pair[1]))
)


def cells(intervals):
    return {cell for start, end in intervals for cell in range(start, end)}


@pytest.mark.slow
@given(INTERVALS, INTERVALS, INTERVALS)
def test_overlap_counts_a_side_as_busy_while_any_of_its_executors_is(trainer, first, second):
    named = {"trainer": trainer, "rollout-0": first, "rollout-1": second}
    spans = {
        name: tuple(Span(state=State.BUSY, start_s=start, end_s=end) for start, end in intervals)
        for name, intervals in named.items()
    }
    roles = {"trainer": "trainer", "rollout-0": "rollout", "rollout-1": "rollout"}
    measured = overlap(spans, roles)
    rollout = cells(first) | cells(second)
    smaller = min(len(cells(trainer)), len(rollout))
    assert measured.value == (len(cells(trainer) & rollout) / smaller if smaller else None)


def rollout(name, **figures):
    return report(name, "rollout", {State.BUSY: 2.0}, **figures)


def test_what_engines_tell_of_their_cache_is_joined_over_workers():
    told = {"kv_cache_usage": 0.25, "engine_running": 6, "engine_waiting": 1}
    first = rollout(
        "rollout-0", sums={"preemptions": 2, "prompt_tokens": 40, "cached_prompt_tokens": 32}, gauges=told
    )
    more = {"preemptions": 1, "prompt_tokens": 10, "cached_prompt_tokens": 0}
    second = rollout("rollout-1", sums=more, gauges=told | {"kv_cache_usage": 0.75})
    values = utilization([first, second])
    assert values["rollouter/preemptions"].value == 3
    assert values["rollouter/prompt_tokens"].value == 50
    assert values["rollouter/cached_prompt_tokens"].value == 32
    assert values["rollouter/kv_cache_usage"].value == 0.75
    assert values["rollouter/engine_running"].value == 12
    assert values["rollouter/engine_waiting"].value == 2


def test_engines_that_tell_nothing_leave_no_figures():
    names = ["preemptions", "prompt_tokens", "kv_cache_usage", "engine_running", "engine_waiting"]
    assert not utilization([rollout("rollout-0")]).keys() & {f"rollouter/{name}" for name in names}


def test_what_tools_cost_is_told_only_where_there_are_tools():
    slots = {"slots": 8}
    state_s = {State.BUSY: 3.0, State.WAITING: 1.0}
    waits = report("rollout-0", "rollout", state_s, sums={"waiting_trajectory_s": 10.0}, gauges=slots)
    busy = report("rollout-1", "rollout", {State.BUSY: 4.0}, sums={"waiting_trajectory_s": 6.0}, gauges=slots)
    values = utilization([waits, busy])
    assert values["rollouter/tool_idle_ratio"].value == (1 / 4 + 0) / 2
    assert values["rollouter/tool_waiting_ratio"].value == (10 + 6) / (2 * 8 * 4)
    assert not [key for key in utilization([rollout("rollout-0", gauges=slots)]) if "tool" in key]


def test_turns_tools_and_facts_of_the_steps_trajectories():
    plain = trajectory(1.0, (0, 5))
    assert episode_values([plain]) == {}
    first = replace(plain, num_turns=3, tool_s=1.5, num_forks=1, facts=(("guesses", 4.0),))
    second = replace(plain, num_turns=1, facts=(("guesses", 1.0), ("found", 1.0)))
    shown = {key: value.value for key, value in episode_values([first, second]).items()}
    assert shown == {
        "env/turns_mean": 2.0,
        "env/turns_max": 3,
        "env/tool_s": 0.75,
        "env/forks": 1,
        "env/guesses": 2.5,
        "env/found": 1.0,
    }


def test_the_share_without_the_reference_counts_rewarded_responses_that_were_looked_at():
    def judged(reward, *names):
        return replace(
            trajectory(reward, (0, 5)), facts=tuple(("reward/names_answer", float(named)) for named in names)
        )

    step = [judged(1.0, True), judged(1.0), *(judged(reward, False) for reward in (1.0, 0.5, 0.4, 0.0))]
    assert reward_values(step)["reward/without_reference_ratio"].value == 2 / 3
    assert episode_values(step) == {}
    for nothing_rewarded in (
        [judged(0.0, False)],
        [judged(-1.0, False), judged(-1.0, True)],
        [judged(1.0)],
        [],
    ):
        assert "reward/without_reference_ratio" not in reward_values(nothing_rewarded)


def test_groups_left_out_for_equal_rewards_have_a_share_and_count_in_the_unfiltered_mean():
    trained = [
        group("p0", trajectory(1.0, (0, 5)), trajectory(0.0, (0, 5))),
        group("p1", trajectory(1.0, (0, 5))),
    ]
    values = filter_values(trained, (0.0, 0.0, 0.0, 1.0, 1.0, 0.0))
    assert values["trainer/filtered_ratio"].value == 6 / 8
    assert values["reward/unfiltered_mean"].value == (0.5 + 1 + 2) / 8
    assert filter_values(trained, None) == {}
