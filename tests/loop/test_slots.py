"""The fleet's kept sets against a search through all workers, after any changes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.contracts.prompt_group import AttemptKey, PartKey
from asyncrl_cli.contracts.weight_version import LoadReport
from asyncrl_cli.loop.fleet import Fleet, WorkerSlots
from asyncrl_cli.loop.weight_sync import WeightSync

N, PREFETCH, SLOTS, WORKERS = 3, 2, 10, 4

changes = st.lists(
    st.tuples(
        st.sampled_from(("set", "free", "evals", "load", "loaded", "down", "up")),
        st.integers(0, WORKERS - 1),
        st.integers(0, 3),
        st.integers(0, N),
    ),
    max_size=60,
)


def key(number: int) -> PartKey:
    return PartKey(AttemptKey(f"p{number}", 0, 0), 0)


def change(worker: WorkerSlots, what: str, group: int, amount: int) -> None:
    if what == "set":
        worker.set_unfinished(key(group), amount)
    elif what == "free":
        worker.release(key(group))
    elif what == "evals":
        worker.change_evals(amount if worker.eval_sequences < 4 else -worker.eval_sequences)
    elif what in ("down", "up"):
        worker.set_down(what == "down")
    elif what == "load":
        worker.begin_load()
    elif not worker.down:
        worker.end_load(worker.version + 1)


def searched(
    workers: list[WorkerSlots], unit: int, num_responses: int, at_least: int
) -> dict[str, int] | None:
    """By the definition: unit by unit to the newest weights, then to the most room, then to the first worker;
    in queues only if the slots of all workers that are up are too few."""
    in_slots = sum(max(0, worker.slots - worker.used) // unit for worker in workers if not worker.down)
    queue = N * PREFETCH if in_slots * unit < num_responses else 0
    room = {worker.name: worker.slots - worker.used + queue for worker in workers}
    placed: dict[str, int] = {}
    while sum(placed.values()) < num_responses:
        able = [w for w in workers if not w.loading and w.version >= at_least and room[w.name] >= unit]
        if not able:
            return None
        name = max(able, key=lambda w: (w.version, room[w.name], -workers.index(w))).name
        placed[name], room[name] = placed.get(name, 0) + unit, room[name] - unit
    return placed


@pytest.mark.slow
@given(changes, st.sampled_from((1, N)), st.integers(0, 2))
def test_where_responses_start_is_what_a_search_through_all_workers_finds(changes, unit, at_least):
    workers = [WorkerSlots(name=f"w{index}", slots=SLOTS) for index in range(WORKERS)]
    fleet = Fleet(workers, unit=unit, queue_sequences=N * PREFETCH)
    for what, index, group, amount in changes:
        change(workers[index], what, group, amount)
        for num_responses in (N,) if unit == N else (1, N, 4 * N):
            placement, expected = (
                fleet.placement(num_responses, at_least),
                searched(workers, unit, num_responses, at_least),
            )
            assert (placement and placement.responses) == expected
            if placement is not None:
                assert placement.version == min(
                    worker.version for worker in workers if worker.name in placement.responses
                )
        assert fleet.is_whole() == (not any(worker.down for worker in workers))
        for version in range(3):
            holds_it = [worker.version == version and not worker.loading for worker in workers]
            assert fleet.are_current(version) == all(holds_it)


@given(st.lists(st.tuples(st.integers(0, WORKERS - 1), st.integers(1, 3)), max_size=40))
def test_a_sync_is_complete_when_the_worker_that_is_furthest_behind_has_it(loads):
    workers, held = (
        [WorkerSlots(name=f"w{index}", slots=SLOTS, version=-1) for index in range(WORKERS)],
        [-1] * WORKERS,
    )
    Fleet(workers, unit=1, queue_sequences=0)
    sync = WeightSync(workers)
    reported: set[int] = set()
    for index, more in loads:
        held[index] += more
        reported.add(held[index])
        report = LoadReport(version=held[index], send_s=0.0, load_s=0.0, pause_s=0.0, logprob_abs_diff=None)
        workers[index].end_load(held[index])
        sync.loaded(report)
        complete = [version for version in reported if version <= min(held)]
        assert sync.summary.get("version") == max(complete, default=None)
