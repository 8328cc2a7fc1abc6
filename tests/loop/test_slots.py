"""The fleet's kept sets against a search through all workers, after any changes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.loop.attempts import AttemptKey
from asyncrl_cli.loop.fleet import Fleet, Room, WeightSync, WorkerSlots
from asyncrl_cli.loop.ports import LoadReport

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


def key(number: int) -> AttemptKey:
    return AttemptKey(f"p{number}", 0, 0)


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


def searched(workers: list[WorkerSlots]) -> list[WorkerSlots]:
    """By the definition: those with free slots for a whole group; if no worker has these, those whose queue has room. A worker
    that is down has neither."""
    up = [worker for worker in workers if not worker.down]
    free = [worker for worker in up if worker.slots - worker.used >= N]
    room = free or [worker for worker in up if worker.slots - worker.used + N * PREFETCH >= N]
    ranked = sorted(
        (worker for worker in room if not worker.loading), key=lambda w: (-w.version, w.used - w.slots, workers.index(w))
    )
    return [worker for place, worker in enumerate(ranked) if worker.version not in {w.version for w in ranked[:place]}]


@given(changes)
def test_who_may_start_a_group_is_what_a_search_through_all_workers_finds(changes):
    workers = [WorkerSlots(name=f"w{index}", slots=SLOTS) for index in range(WORKERS)]
    fleet = Fleet(workers, n=N, prefetch_groups=PREFETCH)
    for what, index, group, amount in changes:
        change(workers[index], what, group, amount)
        assert fleet.candidates() == searched(workers)
        assert fleet.is_awake() == (not all(worker.loading for worker in workers))
        has_room = SLOTS - workers[index].used >= N and not workers[index].down
        assert (workers[index].room is Room.IN_SLOTS) == has_room
        assert fleet.is_whole() == (not any(worker.down for worker in workers))
        for version in range(3):
            holds_it = [worker.version == version and not worker.loading for worker in workers]
            assert fleet.are_current(version) == all(holds_it)


@given(st.lists(st.tuples(st.integers(0, WORKERS - 1), st.integers(1, 3)), max_size=40))
def test_a_sync_is_complete_when_the_worker_that_is_furthest_behind_has_it(loads):
    workers, held = [WorkerSlots(name=f"w{index}", slots=SLOTS, version=-1) for index in range(WORKERS)], [-1] * WORKERS
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
