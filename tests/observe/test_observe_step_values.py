"""Overlap of busy intervals, compared with counting points on a grid."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.loop.states import Span, State
from asyncrl_cli.observe.step_values import overlap, utilization
from tests.observe.conftest import report

INTERVALS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda pair: (pair[0], pair[0] + pair[1])))


def cells(intervals):
    return {cell for start, end in intervals for cell in range(start, end)}


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


def rollout(name, *, sums=None, gauges=None):
    return report(name, "rollout", {State.BUSY: 2.0}, sums=sums, gauges=gauges)


def test_what_engines_tell_of_their_cache_is_joined_over_workers():
    told = {"kv_cache_usage": 0.25, "engine_running": 6, "engine_waiting": 1}
    first = rollout("rollout-0", sums={"preemptions": 2, "prompt_tokens": 40, "cached_prompt_tokens": 32}, gauges=told)
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
    names = (
        "rollouter/preemptions",
        "rollouter/prompt_tokens",
        "rollouter/kv_cache_usage",
        "rollouter/engine_running",
        "rollouter/engine_waiting",
    )
    assert not utilization([rollout("rollout-0")]).keys() & set(names)
