"""What a group's data costs on its way from a rollout worker to a trainer rank, by store.

    python benchmarks/data_plane.py [--groups 32] [--repeat 5] [--store ray transferqueue pickled]
    [--units 2] [--json]

A process puts groups of 16 trajectories, one key each. Another one gets them in batches of 8 keys, and copies
every array to where a microbatch would be (warm memory). The driver tells it the keys. Responses are as long
as those of a 7B model that reasons: lognormal, median 4,000 tokens, at most 28,000, after prompts of 512; 13
bytes for each token.

    put            until the last group is in the store, for the driver, too
    all            get and copy all arrays
    tokens, mask   get and copy only these, which a scorer needs
    memcpy         these copies alone, of arrays in the process's own memory
    pickled        a store without a schema: whole groups go through cloudpickle and an actor's deque, as in
                   verl's MessageQueue. Whoever wants only tokens gets all
    x memcpy       of a rate to memcpy's, in the same repeat. Goal for `ray`, all: at least 0.5
    CPU            seconds of all processes, Ray's included, for a put and a get of everything
    private        memory that the getting process has of its own at the most while it gets everything, as a
                   multiple of the bytes. It is 0 where arrays are views of shared memory
    RSS            its resident memory at the most, shared memory included
    driver         bytes of groups that went through the driver

Figures are medians over the repeats, in which the stores take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import psutil
import ray
from engine_kit import conditions, table
from ray.experimental import get_object_locations

from asyncrl_cli.data import ray_store, transferqueue_store
from asyncrl_cli.data.ray_store import RayStore
from asyncrl_cli.data.sample_fields import BUILT_IN
from asyncrl_cli.data.store import Store, Stored
from asyncrl_cli.data.trajectories import Trajectory, segment_of, trajectory_of
from asyncrl_cli.data.transferqueue_store import TransferQueueStore
from asyncrl_cli.job.ray.local_ray import STORED_RETURNS
from asyncrl_cli.profile.rollout_sections import DataPlaneSection

MIB = 2**20
N, PROMPT_TOKENS, BATCH_KEYS, MOST_OBJECTS = 16, 512, 8, 8
MEDIAN_TOKENS, SIGMA, MOST_TOKENS = 4_000, 0.9, 28_000
SCORER_FIELDS = ("tokens", "mask")
GOAL = 0.5
STORES = ("memcpy", "ray", "transferqueue", "pickled")
COLUMNS = (
    "put",
    "all",
    "x memcpy",
    "tokens, mask",
    "x memcpy ",
    "CPU put",
    "CPU get",
    "private",
    "RSS MiB",
    "driver",
)


def group(seed: int) -> list[Trajectory]:
    rng = random.Random(seed)
    found = []
    for _ in range(N):
        length = min(int(MEDIAN_TOKENS * rng.lognormvariate(0, SIGMA)) + 1, MOST_TOKENS)
        tokens = np.random.default_rng(seed).integers(0, 150_000, PROMPT_TOKENS + length)
        versions = np.repeat([-1, 7], [PROMPT_TOKENS, length])
        found.append(
            trajectory_of([segment_of(tokens, -0.1 * (versions > 0), versions)], BUILT_IN, reward=1.0)
        )
    return found


def arrays_of(groups: Sequence[Sequence[Trajectory]]) -> list[Any]:
    return [array for trajectories in groups for one in trajectories for array in one.per_token.values()]


class Queue:
    """verl's MessageQueue: whole samples in an actor's memory, as bytes."""

    def __init__(self) -> None:
        self._samples = deque[bytes]()

    def put(self, sample: bytes) -> None:
        self._samples.append(sample)

    def get(self, count: int) -> list[bytes]:
        return [self._samples.popleft() for _ in range(count)]


class Peak:
    """The most memory that this process has in a block, in bytes above what it had before."""

    def __enter__(self) -> Peak:
        self._ended = threading.Event()
        self._before = self._now()
        self.private = self.resident = 0
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        self.resident += self._before[1]

    def _look(self) -> None:
        while not self._ended.wait(0.005):
            private, resident = self._now()
            self.private = max(self.private, private - self._before[0])
            self.resident = max(self.resident, resident - self._before[1])

    @staticmethod
    def _now() -> tuple[int, int]:
        memory = psutil.Process().memory_info()
        return memory.rss - memory.shared, memory.rss


class Worker:
    """A rollout worker that puts, or a rank that gets."""

    def __init__(self, seeds: Sequence[int], make_store: Any = None, queue: Any = None) -> None:
        self._groups = [group(seed) for seed in seeds]
        self._store: Store | None = make_store() if make_store else None
        self._queue = queue
        # written to, so that a copy into it takes no page faults
        self._microbatch = [np.ones_like(array) for array in arrays_of(self._groups)]

    def num_bytes(self, fields: Sequence[str] | None = None) -> int:
        groups = [one for trajectories in self._groups for one in trajectories]
        names = fields or BUILT_IN
        return sum(array.nbytes for one in groups for name, array in one.per_token.items() if name in names)

    def put(self, index: int, key: str) -> Any:
        if self._store is None:
            ray.get(self._queue.put.remote(ray.cloudpickle.dumps(self._groups[index])))
            return [None]
        stored = self._store.put(key, self._groups[index])
        if not isinstance(self._store, RayStore):
            return [stored]
        (head,), objects = ray_store.shipped([stored], MOST_OBJECTS)
        return [head, *objects]

    def get(self, stored: list[Stored], fields: Sequence[str] | None) -> tuple[float, int, int]:
        """Seconds, and the most private and resident bytes."""
        with Peak() as peak:
            began_s = time.perf_counter()
            for first in range(0, len(self._groups), BATCH_KEYS):
                count = min(BATCH_KEYS, len(self._groups) - first)
                if self._store is not None:
                    found = self._store.get(stored[first : first + count], fields)
                elif self._queue is not None:
                    found = [ray.cloudpickle.loads(one) for one in ray.get(self._queue.get.remote(count))]
                else:
                    found = self._groups[first : first + count]
                self._fill(found, first, fields)
            took_s = time.perf_counter() - began_s
        return took_s, peak.private, peak.resident

    def _fill(self, groups: Sequence[Sequence[Trajectory]], first: int, fields: Sequence[str] | None) -> None:
        place = sum(len(arrays_of([one])) for one in self._groups[:first])
        for trajectories, mine in zip(groups, self._groups[first:], strict=False):
            for one, was in zip(trajectories, mine, strict=True):
                for name in was.per_token:
                    if fields is None or name in fields:
                        np.copyto(self._microbatch[place], one.per_token[name])
                    place += 1

    def check(self) -> None:
        """Raises AssertionError if the microbatch does not have the groups' data."""
        for found, array in zip(self._microbatch, arrays_of(self._groups), strict=True):
            np.testing.assert_array_equal(found, array)
            found[...] = 1


def cpu_s() -> float:
    """Of this process and all its children: Ray's daemons, and through them all actors."""
    total = 0.0
    for process in (own := psutil.Process(), *own.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


class Contender:
    """A store, with one process at each end."""

    def __init__(self, name: str, groups: int, units: int) -> None:
        self.name, self.groups = name, groups
        self.store: Store | None = None
        make_store, self.queue = None, None
        if name == "ray":
            self.store, make_store = RayStore(), RayStore
        elif name == "transferqueue":
            plane = DataPlaneSection(storage_units=units, storage_cpus_per_unit=0)
            store = transferqueue_store.start("benchmark", plane)
            self.store, make_store = store, partial(TransferQueueStore, store.address)
        elif name == "pickled":
            self.queue = ray.remote(num_cpus=0)(Queue).remote()
        start = ray.remote(num_cpus=0)(Worker).remote
        self.writer, self.reader = (start(range(groups), make_store, self.queue) for _ in range(2))
        self.bytes, self.scorer_bytes = ray.get(
            [self.reader.num_bytes.remote(), self.reader.num_bytes.remote(SCORER_FIELDS)]
        )

    def measure(self) -> dict[str, float]:
        """One repeat. Rates in MiB/s."""
        found: dict[str, float] = {}
        for what, fields in (("tokens, mask", SCORER_FIELDS), ("all", None)):
            put = self._put() if self.name != "memcpy" else {}
            stored = self.store.stored(self.store.keys()) if self.store else []
            began_s = cpu_s()
            took_s, private, resident = ray.get(self.reader.get.remote(stored, fields))
            cpu = cpu_s() - began_s
            found |= put
            found[what] = (self.bytes if fields is None else self.scorer_bytes) / took_s / MIB
            if self.store:
                self.store.clear(self.store.keys())
                assert not self.store.keys()  # waits for it
        ray.get(self.reader.check.remote())
        return found | {"CPU get": cpu, "private": private / self.bytes, "RSS MiB": resident / MIB}

    def _put(self) -> dict[str, float]:
        began_s, cpu_began_s = time.perf_counter(), cpu_s()
        num_returns = 1 + MOST_OBJECTS if self.name == "ray" else 1
        put = self.writer.put.options(num_returns=num_returns)
        answers = [put.remote(index, f"{index:04}@0.0/0") for index in range(self.groups)]
        answers = [one if isinstance(one, list) else [one] for one in answers]
        refs = [ref for answer in answers for ref in answer]
        ray.wait(refs, num_returns=len(refs), fetch_local=False)
        took_s = time.perf_counter() - began_s
        cpu = cpu_s() - cpu_began_s
        through_driver = 0
        for head, *objects in answers:
            stored = ray.get(head)
            if self.name == "ray":
                places = get_object_locations(objects[: len(stored.pieces)])
                # an object that is on no node came within the answer
                through_driver += sum(one["object_size"] for one in places.values() if not one["node_ids"])
                assert self.store is not None
                self.store.hold(ray_store.received([stored], objects)[0])
            elif self.store is not None:
                self.store.hold(stored[0])
        return {"put": self.bytes / took_s / MIB, "CPU put": cpu, "driver": through_driver}

    def close(self) -> None:
        for actor in (self.writer, self.reader, self.queue):
            if actor is not None:
                ray.kill(actor)
        if self.store is not None:
            self.store.close()


@contextlib.contextmanager
def contenders(names: Sequence[str], options: argparse.Namespace) -> Iterator[list[Contender]]:
    num_bytes = options.groups * N * 13 * (PROMPT_TOKENS + 2 * MEDIAN_TOKENS)
    started = list[Contender]()
    os.environ |= STORED_RETURNS  # as in a run
    ray.init(
        num_cpus=8,  # Ray warns of more processes than four for each
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=3 * num_bytes + 256 * MIB,
    )
    try:
        for name in names:
            started.append(Contender(name, options.groups, options.units))
        yield started
    finally:
        for one in started:
            one.close()
        ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--store", nargs="+", choices=STORES[1:], default=STORES[1:])
    parser.add_argument("--units", type=int, default=2, help="storage processes of transferqueue")
    parser.add_argument("--json", action="store_true", help="print all repeats as JSON instead of the table")
    options = parser.parse_args()
    needed = 8 * options.groups * N * 13 * (PROMPT_TOKENS + 2 * MEDIAN_TOKENS) * len(options.store)
    if needed > psutil.virtual_memory().available:
        parser.error(f"{options.groups} groups take about {needed / 2**30:.1f} GiB of memory: fewer --groups")
    found: dict[str, list[dict[str, float]]] = {}
    with contenders(["memcpy", *options.store], options) as sides:
        for one in sides:
            one.measure()  # imports, first connections, memory that is used again
        for repeat in range(options.repeat):
            for one in sides:
                figures = one.measure()
                baseline = found["memcpy"][repeat] if one.name != "memcpy" else figures
                figures["x memcpy"] = figures["all"] / baseline["all"]
                figures["x memcpy "] = figures["tokens, mask"] / baseline["tokens, mask"]
                found.setdefault(one.name, []).append(figures)
                print(one.name, {name: round(value, 2) for name, value in figures.items()}, file=sys.stderr)
        mib = sides[0].bytes / MIB
    if options.json:
        print(json.dumps({"conditions": conditions(), "MiB": mib, "results": found}))
        return
    rows = []
    for name, repeats in found.items():
        cells = [[one[column] for one in repeats if column in one] for column in COLUMNS]
        rows.append([name, *(f"{statistics.median(cell):,.4g}" if cell else "" for cell in cells)])
    print(f"{options.groups} groups of {N}, {mib:.0f} MiB; rates in MiB/s; medians of {options.repeat}")
    print(table(["store", *map(str.strip, COLUMNS)], rows))
    print(f"\ngoal: ray, all: at least {GOAL:g} x memcpy. {conditions()}")


if __name__ == "__main__":
    main()
