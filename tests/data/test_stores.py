"""One suite for every store: what is put comes back, by field; what is cleared is gone; pins hold."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from benchmarks.local_store import LocalStore
from ray.exceptions import ActorDiedError, ActorUnavailableError, ObjectLostError

from asyncrl_cli.base.errors import ExecutorFailed, ExecutorLost, PreflightError, SessionLost
from asyncrl_cli.data import ray_store, transferqueue_client, transferqueue_store
from asyncrl_cli.data.ragged import Ragged
from asyncrl_cli.data.ray_store import SPLIT_BYTES, RayStore
from asyncrl_cli.data.sample_fields import FIELDS, Field, Schema
from asyncrl_cli.data.store import Store, Stored
from asyncrl_cli.data.trajectories import Trajectory, segment_of, trajectory_of
from asyncrl_cli.data.transferqueue_store import TransferQueueStore
from asyncrl_cli.job.ray.local_ray import ray_variables
from asyncrl_cli.profile.rollout_sections import DataPlaneSection
from tests.data.test_trajectories import PLUGGED, drawn

BETWEEN = ("ray", "transferqueue")
"""Stores that processes share."""
NO_CPUS = DataPlaneSection(backend="transferqueue", storage_cpus_per_unit=0)
MakeStore = Callable[[], Store]


@pytest.fixture(params=["local", *(pytest.param(name, marks=pytest.mark.slow) for name in BETWEEN)])
def make_store(request: pytest.FixtureRequest) -> MakeStore:
    """Makes a store's end in any process, always of the same data."""
    if request.param == "local":
        return partial(LocalStore, PLUGGED)
    request.getfixturevalue("ray_session")
    if request.param == "ray":
        return partial(RayStore, PLUGGED)
    driver: TransferQueueStore = request.getfixturevalue("transfer_queue")
    return partial(TransferQueueStore, replace(driver.address, run=request.node.name), PLUGGED)


@pytest.fixture
def store(make_store: MakeStore) -> Iterator[Store]:
    with contextlib.closing(make_store()) as store:
        yield store


@pytest.fixture(scope="module")
def ray_session() -> Iterator[None]:
    """Without a token: that of an earlier session in this process would be refused."""
    with ray_variables(RAY_AUTH_MODE="disabled", RAY_AUTH_TOKEN_PATH=None, RAY_AUTH_TOKEN=None):
        ray.init(num_cpus=1, include_dashboard=False, logging_level="error", log_to_driver=False)
        yield
        ray.shutdown()


def pid_of(actor: Any) -> int:
    pid: int = ray.get(actor.__ray_call__.remote(lambda self: os.getpid()))
    return pid


def ended(pid: int, limit_s: float = 20.0) -> bool:
    """Whether a process ends within the limit."""
    until_s = time.monotonic() + limit_s
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > until_s:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture(scope="module")
def transfer_queue(ray_session: None) -> Iterator[TransferQueueStore]:
    """A driver's store; tests take a partition of their own each."""
    pytest.importorskip("transfer_queue")
    with contextlib.closing(transferqueue_store.start("all", NO_CPUS, PLUGGED)) as store:
        pids = [pid_of(actor) for actor in store.address.actors.values()]
        yield store
    assert all(ended(pid) for pid in pids)


def put(store: Store, key: str, seed: int) -> Stored:
    """Put drawn trajectories, as a worker does, and hold them, as the driver does."""
    trajectories, _ = drawn(random.Random(seed))
    stored = arrived(store, pickle.loads(pickle.dumps(store.put(key, trajectories))))
    store.hold(stored)
    return stored


def arrived(store: Store, stored: Stored) -> Stored:
    if not isinstance(store, RayStore):
        return stored
    heads, objects = ray_store.shipped([stored], 20)
    return ray_store.received(heads, [ray.put(one) for one in objects])[0]


def test_only_the_fields_that_are_asked_for_come_back(store: Store) -> None:
    put(store, "a@0.0/0", 3)
    trajectories, _ = drawn(random.Random(3))
    (some,), (everything,) = (store.get(store.stored(["a@0.0/0"]), fields) for fields in (["tokens"], None))
    assert len(some) == len(everything) == len(trajectories)
    for one, whole, was in zip(some, everything, trajectories, strict=True):
        assert set(one.per_token) == {"tokens"}
        assert not one.per_sampled
        assert one.counts == whole.counts == was.counts
        assert one.values == was.values
        np.testing.assert_array_equal(one.per_token["tokens"], was.per_token["tokens"])
        for name, array in was.per_token.items():
            np.testing.assert_array_equal(whole.per_token[name], array)
            assert whole.per_token[name].dtype == array.dtype
        for name, array in was.per_sampled.items():
            assert whole.per_sampled[name].tolist() == array.tolist()


def test_columns_are_added_beside_what_is_there_and_over_earlier_ones(store: Store) -> None:
    stored = put(store, "a@0.0/0", 3)
    trajectories, _ = drawn(random.Random(3))
    for value in (1.0, 2.0):
        for name in ("ref", "critic"):  # two scorers at once: each adds to what it was given
            column = [np.full(one.num_sampled, value, np.float32) for one in trajectories]
            store.hold(arrived(store, store.add(stored, name, column)))
    (found,) = store.get(store.stored(["a@0.0/0"]), ["ref", "critic", "tokens"])
    for one, was in zip(found, trajectories, strict=True):
        assert (
            one.per_sampled["ref"].tolist() == one.per_sampled["critic"].tolist() == [2.0] * was.num_sampled
        )
        np.testing.assert_array_equal(one.per_token["tokens"], was.per_token["tokens"])


def test_cleared_keys_are_gone_and_clearing_twice_is_nothing(store: Store) -> None:
    for seed in range(4):
        put(store, f"a@0.{seed}/0", seed)
    put(store, "b@0.0/0", 9)
    store.clear(["a@0.1/0", "a@0.2/0", "unknown"])
    store.clear(["a@0.1/0"])
    assert sorted(store.keys()) == ["a@0.0/0", "a@0.3/0", "b@0.0/0"]
    with pytest.raises(KeyError):
        store.stored(["a@0.1/0"])
    assert store.stats()["keys"] == 3


def test_pinned_data_outlives_its_clear(store: Store) -> None:
    put(store, "a@0.0/0", 3)
    put(store, "b@0.0/0", 5)
    with store.pinned(["a@0.0/0"]) as outer:
        with store.pinned(["a@0.0/0", "b@0.0/0"]):
            store.clear(["a@0.0/0", "b@0.0/0"])
        assert store.keys() == []
        assert len(store.get(outer)[0]) == len(drawn(random.Random(3))[0])
        with pytest.raises(KeyError):
            store.stored(["b@0.0/0"])
    with pytest.raises(KeyError):
        store.stored(["a@0.0/0"])


def test_traffic_counts_bytes_of_arrays(store: Store) -> None:
    put(store, "a@0.0/0", 3)
    trajectories, _ = drawn(random.Random(3))
    arrays = [array for one in trajectories for array in (*one.per_token.values(), *one.per_sampled.values())]
    num_bytes = sum((one.encoded() if isinstance(one, Ragged) else one).nbytes for one in arrays)
    sums = store.traffic.sums
    # a field that only some trajectories have is filled in the others
    assert num_bytes <= sums["data_bytes_put"] == store.stats()["bytes"]
    store.get(store.stored(["a@0.0/0"]), ["tokens"])
    assert sums["data_bytes_fetched"] == sum(4 * one.num_tokens for one in trajectories)
    assert sums["data_fetch_s"] >= 0


class Process:
    """A rollout worker or a scorer."""

    def __init__(self, make_store: MakeStore) -> None:
        self._store = make_store()

    def put(self, key: str, seed: int) -> Stored:
        return self._store.put(key, drawn(random.Random(seed))[0])

    def tokens(self, stored: list[Stored]) -> list[list[list[int]]]:
        found = self._store.get(stored, ["tokens"])
        return [[one.per_token["tokens"].tolist() for one in trajectories] for trajectories in found]


def tokens_of(seed: int) -> list[list[int]]:
    return [one.per_token["tokens"].tolist() for one in drawn(random.Random(seed))[0]]


def process(make_store: MakeStore) -> Any:
    return ray.remote(num_cpus=0)(Process).remote(make_store)


@pytest.mark.parametrize(
    "make_store", [pytest.param(name, marks=pytest.mark.slow) for name in BETWEEN], indirect=True
)
def test_what_one_process_puts_another_gets_and_the_driver_clears(
    store: Store, make_store: MakeStore
) -> None:
    writer, reader = process(make_store), process(make_store)
    for seed in (3, 4, 5):
        store.hold(arrived(store, ray.get(writer.put.remote(f"a@0.{seed}/0", seed))))
    ray.kill(writer)  # what it has put stays
    stored = store.stored(["a@0.5/0", "a@0.3/0"])
    assert ray.get(reader.tokens.remote(stored)) == [tokens_of(5), tokens_of(3)]
    store.clear(["a@0.5/0"])
    assert sorted(store.keys()) == ["a@0.3/0", "a@0.4/0"]


def test_a_large_column_on_ray_is_one_object() -> None:
    """A scorer's call has room for one for each part."""
    store, count = RayStore(PLUGGED), SPLIT_BYTES // 2
    added = store.add(Stored("a@0.0/0", 1, ()), "ref", [np.zeros(count, np.float32)])
    assert [piece.names for piece in added.pieces] == [("sampled/ref",)]
    assert len(ray_store.shipped([added], 1)[1]) == 1


@pytest.mark.slow
def test_a_large_part_on_ray_is_fetched_by_field_and_without_a_copy(ray_session: None) -> None:
    store = RayStore(PLUGGED)
    trajectories, _ = drawn(random.Random(3))
    stored = arrived(store, store.put("a@0.0/0", trajectories * 40_000))
    assert len(stored.pieces) > 4
    store.get([stored], ["tokens"])
    sums = store.traffic.sums
    assert sums["data_bytes_fetched"] == 40_000 * 4 * sum(one.num_tokens for one in trajectories)
    assert sums["data_bytes_copied"] == 0


def test_arrays_that_ray_has_lost_are_named_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(*args: Any, **options: Any) -> None:
        raise ObjectLostError("ab12", None, "")

    store = RayStore(PLUGGED)
    stored = store.put("a@0.0/0", [])
    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(ExecutorLost, match="the ray store failed: arrays were lost"):
        store.get([stored])


# --- TransferQueue and its troubles


@pytest.fixture
def make_tq(request: pytest.FixtureRequest, transfer_queue: TransferQueueStore) -> MakeStore:
    return partial(TransferQueueStore, replace(transfer_queue.address, run=request.node.name), PLUGGED, 20.0)


@pytest.fixture
def tq(make_tq: MakeStore) -> Iterator[Store]:
    with contextlib.closing(make_tq()) as store:
        yield store


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.slow
def test_every_dtype_and_shape_comes_back_from_transferqueue_exactly(
    transfer_queue: TransferQueueStore,
) -> None:
    dtypes = [np.dtype(code).name for code in "?bBhHiIlLefd"]
    fields = [Field(name=name, per="token", by="engine", dtype=name, shape=(2, 3)) for name in dtypes]
    schema = Schema([*FIELDS, *fields])
    rng = np.random.default_rng(0)

    def part(count: int) -> list[Trajectory]:
        segment = segment_of([1] * count, [0.0] * count, [-1] * count)
        more = {one.name: (rng.random((count, 2, 3)) * 99).astype(one.dtype) for one in fields}
        return [trajectory_of([{**segment, **more}], schema)]

    with contextlib.closing(
        TransferQueueStore(replace(transfer_queue.address, run="dtypes"), schema)
    ) as store:
        parts = {f"a@0.{count}/0": part(count) for count in (5, 0, 7)}
        got = store.get([store.put(key, one) for key, one in parts.items()])
    for (found,), (was,) in zip(got, parts.values(), strict=True):
        for name, array in was.per_token.items():
            assert found.per_token[name].dtype == array.dtype
            assert found.per_token[name].shape == array.shape
            np.testing.assert_array_equal(found.per_token[name], array)


@pytest.mark.slow
def test_too_few_cpus_for_transferqueue_are_refused_at_once(transfer_queue: TransferQueueStore) -> None:
    with pytest.raises(PreflightError, match="need 3 CPUs, and the cluster has 1 free") as refused:
        transferqueue_store.start("run", DataPlaneSection(backend="transferqueue", storage_cpus_per_unit=1))
    assert refused.value.exit_code == 3
    assert "--set data_plane.storage_units=1" in refused.value.hint


@pytest.mark.slow
def test_actors_that_do_not_start_in_time_are_ended(
    transfer_queue: TransferQueueStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transferqueue_client, "START_LIMIT_S", 0.01)
    with pytest.raises(PreflightError, match=r"did not start within 0\.01 s"):
        transferqueue_store.start("run", NO_CPUS)


@pytest.mark.parametrize(
    ("found", "match"),
    [
        ("", "TransferQueue is not installed"),
        ("0.1.9", r"0\.1\.9 is installed, asyncrl works with 0\.1\.11"),
    ],
)
def test_another_transferqueue_or_none_is_refused(
    found: str, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if not found:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(PreflightError, match=match) as refused:
        transferqueue_store.start("run", NO_CPUS)
    assert refused.value.hint == "pip install 'asyncrl-cli[transferqueue]'"


@pytest.mark.slow
def test_keys_that_the_driver_never_heard_of_are_seen_and_cleared(tq: Store, make_tq: MakeStore) -> None:
    with contextlib.closing(make_tq()) as dying_worker:
        dying_worker.put("a@0.0/0", drawn(random.Random(3))[0])
    assert tq.keys() == ["a@0.0/0"]
    tq.clear(["a@0.0/0"])
    assert tq.keys() == []


@pytest.mark.slow
def test_partitions_do_not_disturb_each_other(tq: Store, transfer_queue: TransferQueueStore) -> None:
    with contextlib.closing(
        TransferQueueStore(replace(transfer_queue.address, run="other"), PLUGGED)
    ) as other:
        for seed in range(6):
            put(tq, f"a@0.{seed}/0", seed)
            put(other, f"a@0.{seed}/0", seed + 10)
        tq.clear(tq.keys())
        assert tq.keys() == []
        for seed in range(6):
            (found,) = other.get(other.stored([f"a@0.{seed}/0"]), ["tokens"])
            assert [one.per_token["tokens"].tolist() for one in found] == tokens_of(seed + 10)


@pytest.mark.slow
def test_a_second_clear_does_not_take_what_has_the_index_now(tq: Store) -> None:
    for round_ in range(20):
        old, new = ([f"{name}@0.{round_}/{part}" for part in range(4)] for name in ("old", "new"))
        for key in old:
            put(tq, key, 3)
        for _ in range(3):
            tq.clear(old)
        for key in new:
            put(tq, key, 4)
        tq.clear(old)
        assert set(new) <= set(tq.keys())
        assert not set(old) & set(tq.keys())
        assert all(len(one) == len(tokens_of(4)) for one in tq.get(tq.stored(new)))


@pytest.mark.slow
@pytest.mark.parametrize("reused", [False, True])
def test_a_get_that_races_with_a_clear_fails_and_never_returns_other_data(
    reused: bool, tq: Store, make_tq: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transfer_queue.client import AsyncTransferQueueClient

    read = AsyncTransferQueueClient.async_get_data
    with contextlib.closing(make_tq()) as reader:

        async def swap_and_read(*args: Any) -> Any:
            """Between a get's look at the index and its look at the data."""
            monkeypatch.undo()
            await asyncio.to_thread(swap)
            return await read(*args)

        def swap() -> None:
            tq.clear(["a@0.0/0"])
            assert tq.keys() == []
            for seed in range(4 if reused else 0):
                put(tq, f"b@0.{seed}/0", 4)

        stored = put(tq, "a@0.0/0", 3)
        assert len(reader.get([stored])[0]) == len(tokens_of(3))
        monkeypatch.setattr(AsyncTransferQueueClient, "async_get_data", swap_and_read)
        with pytest.raises(ExecutorLost, match=r"a@0\.0/0 is not there, or was cleared meanwhile"):
            reader.get([stored])


@pytest.mark.slow
def test_a_column_for_a_cleared_key_is_refused_and_leaves_no_orphan(tq: Store) -> None:
    stored = put(tq, "a@0.0/0", 3)
    tq.clear(["a@0.0/0"])
    assert tq.keys() == []
    with pytest.raises(ExecutorLost, match=r"the add: a@0\.0/0 is not there"):
        tq.add(stored, "ref", [np.zeros(2, np.float32)])
    assert tq.keys() == []


@pytest.mark.slow
def test_a_put_that_the_controller_does_not_note_fails(tq: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from transfer_queue.storage.managers.base import StorageManager

    async def lose(*args: Any) -> None:
        pass

    monkeypatch.setattr(StorageManager, "notify_data_update", lose)
    with pytest.raises(ExecutorFailed, match="did not note the put of"):
        put(tq, "a@0.0/0", 3)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:Unclosed context:ResourceWarning"
)  # the package's, of a refused handshake
def test_calls_that_nobody_answers_end_at_their_limit(
    tq: Store, make_tq: MakeStore, transfer_queue: TransferQueueStore
) -> None:
    stored = put(tq, "a@0.0/0", 3)
    tq.limit_s = 1.0
    controller, *units = [pid_of(actor) for actor in transfer_queue.address.actors.values()]
    with frozen(units[0]), frozen(units[1]):
        began_s = time.monotonic()
        with pytest.raises(
            ExecutorFailed, match=r"the get of 1 keys took longer than data_plane.timeout_s = 1 s"
        ):
            tq.get([stored])
        assert 1 <= time.monotonic() - began_s < 5
    with frozen(controller):
        began_s = time.monotonic()
        tq.clear(["a@0.0/0"])
        assert tq.stats() == {"keys": 0, "bytes": 0}
        assert time.monotonic() - began_s < 0.5
        failures = list[str]()
        while len(failures) < 4 and not any("the clear of 1 keys took" in one for one in failures):
            with pytest.raises(ExecutorFailed, match="transferqueue store failed") as late:
                tq.keys()
            failures.append(late.value.message)
        assert "the list of 0 keys took longer" in failures[0]
        assert "the clear of 1 keys took longer" in failures[-1]
        with contextlib.closing(make_tq()) as other:
            other.limit_s = 1.0
            began_s = time.monotonic()
            with pytest.raises(ExecutorFailed, match="the get of 1 keys took longer"):
                other.get([stored])
            assert time.monotonic() - began_s < 15  # the package's handshakes take 4 s each
    tq.limit_s = 20.0
    tq.clear(["a@0.0/0"])
    assert tq.keys() == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Unclosed context:ResourceWarning")
def test_a_storage_unit_that_is_killed_is_named_by_every_process_long_before_the_limit(
    ray_session: None,
) -> None:
    pytest.importorskip("transfer_queue")
    plane = DataPlaneSection(backend="transferqueue", storage_units=2)
    with (
        contextlib.closing(transferqueue_store.start("killed", plane, PLUGGED)) as driver,
        contextlib.closing(TransferQueueStore(driver.address, PLUGGED)) as worker,
    ):
        stored = [put(worker, f"a@0.{number}/0", 3) for number in range(4)]  # in both units
        os.kill(pid_of(driver.address.actors["storage unit 2 of 2"]), signal.SIGKILL)
        began_s, dead = time.monotonic(), "storage unit 2 of 2 of TransferQueue has died"
        with pytest.raises(SessionLost, match=dead):
            worker.get(stored)
        with pytest.raises(SessionLost, match=dead):
            driver.keys()
        assert time.monotonic() - began_s < 30 < worker.limit_s


@pytest.mark.parametrize(
    ("error", "expected", "why"),
    [
        (ActorDiedError(), SessionLost, "the controller of TransferQueue has died"),
        (
            ActorUnavailableError("cut off", None),
            ExecutorFailed,
            "TransferQueue cannot be reached: .*off",
        ),
    ],
)
def test_a_process_that_ray_cannot_reach_for_now_is_not_called_dead(monkeypatch, error, expected, why):
    ping = SimpleNamespace(get_zmq_server_info=SimpleNamespace(remote=lambda: "ping"))

    def get(ref: str) -> None:
        raise error

    monkeypatch.setattr(ray, "wait", lambda refs, **_: (refs, []))
    monkeypatch.setattr(ray, "get", get)
    address = transferqueue_client.Address(run="r", controller=0, units={}, actors={"the controller": ping})
    with pytest.raises(expected, match=why) as raised:
        transferqueue_client.check_alive(address)
    assert bool(raised.value.hint) == (expected is ExecutorFailed)


DRIVER = """
import os, ray, sys
from asyncrl_cli.data import transferqueue_store
from asyncrl_cli.data.trajectories import Trajectory
from asyncrl_cli.profile.rollout_sections import DataPlaneSection
ray.init(address="{address}", log_to_driver=False, logging_level="error")
plane = DataPlaneSection(storage_units=1, storage_cpus_per_unit=0)
store = transferqueue_store.start("{run}", plane)
store.put("a@0.0/0", [Trajectory()])
pids = [actor.__ray_call__.remote(lambda self: os.getpid()) for actor in store.address.actors.values()]
print("pids", *ray.get(pids), flush=True)
sys.stdin.readline()
print("keys", *store.keys(), flush=True)
sys.stdin.readline()
"""


@pytest.mark.slow
def test_two_runs_on_one_cluster_do_not_meet_and_a_killed_driver_takes_its_own_actors_along(
    tq: TransferQueueStore,
) -> None:
    program = DRIVER.format(address=ray.get_runtime_context().gcs_address, run=tq.address.run)
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, text=True) as driver:
        assert driver.stdin is not None
        assert driver.stdout is not None
        # Ray may print lines of its own
        pids = next(
            [int(pid) for pid in line.split()[1:]] for line in driver.stdout if line.startswith("pids")
        )
        assert len(pids) == 2
        put(tq, "a@0.0/0", 3)
        tq.clear(["a@0.0/0"])
        assert tq.keys() == []
        driver.stdin.write("\n")
        driver.stdin.flush()
        keys = next(line.split()[1:] for line in driver.stdout if line.startswith("keys"))
        assert keys == ["a@0.0/0"]
        assert all(psutil.pid_exists(pid) for pid in pids)
        driver.kill()
    assert all(ended(pid) for pid in pids)
    put(tq, "b@0.0/0", 3)
    assert tq.keys() == ["b@0.0/0"]
