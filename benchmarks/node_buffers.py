"""What a node's rollout workers hold of the versions that they receive, together.

    python benchmarks/node_buffers.py [--mb 256] [--workers 1 2 4] [--versions 4]

Each worker is a process with the receiving side of a run (`Loader`) and an engine that copies what it loads
over weights of its own. Buckets lie in files that workers map, as they map those of an object store. In both
encodings the weights are bfloat16, of which 2% change before each version. `alone`: without the file by which
a node's workers share what arrives.

    peak         what all workers hold together beyond what they had before the first version, at most, looked
                 at every 20 ms: proportional set sizes of anonymous memory and of buffers
    after        the same, once all have loaded the last version
    CPU          seconds of all workers for a version, on average, without the first
    fetched      bytes of a version that the workers fetched together, likewise
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import pickle
import resource
import tempfile
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_kit import MB, conditions, table

from asyncrl_cli.engines.port import Engine, PauseReport
from asyncrl_cli.envs.slots import Slots
from asyncrl_cli.job.rollout_weights import Loader
from asyncrl_cli.measure.meters import RolloutMeter
from asyncrl_cli.profile.schema import WeightsSection
from asyncrl_cli.weights.buckets import Bucket, Layout, Packing, Spec, plan_layout
from asyncrl_cli.weights.deltas import Delta
from asyncrl_cli.weights.receivers import manifest_of
from asyncrl_cli.weights.senders import DeltaSender
from asyncrl_cli.weights.versions import Manifest, send

TENSOR_BYTES, BUCKET_BYTES = 2 * MB, 4 * MB
CHANGED = 0.02
LOOK_S = 0.02


@dataclass(frozen=True)
class Mapped:
    path: Path
    entries: Layout

    def read(self) -> Bucket:
        return Bucket(data=np.memmap(self.path, np.uint8, "r"), entries=self.entries)


@dataclass(frozen=True)
class Pickled:
    path: Path

    def read(self) -> Delta:
        delta: Delta = pickle.loads(self.path.read_bytes())
        return delta


@dataclass
class Files:
    """A sender of files in memory."""

    directory: Path
    count: int = 0

    def begin(self, version: int, num_buckets: int) -> None: ...

    def finish(self, manifest: Manifest) -> None: ...

    def keep(self, wanted: Collection[int]) -> None: ...

    def put(self, bucket: Bucket) -> Mapped:
        self.count += 1
        path = self.directory / f"{self.count}.bucket"
        path.write_bytes(bucket.data.data)
        return Mapped(path, bucket.entries)

    def put_delta(self, delta: Delta, whole: Mapped) -> Pickled:
        path = whole.path.with_suffix(".delta")
        path.write_bytes(pickle.dumps(delta))
        return Pickled(path)


class Holding(Engine):
    def __init__(self, specs: list[Spec]) -> None:
        self.held = {one.name: torch.ones(one.shape, dtype=torch.bfloat16) for one in specs}

    async def load(self, weights: Any, version: int, interrupt: str) -> PauseReport:
        for name, one in weights.items():
            self.held[name].copy_(one)
        return PauseReport(load_s=0.0, pause_s=0.0)


def worker(driver: Connection, specs: list[Spec], node_file: Path | None, deltas: bool) -> None:
    torch.set_num_threads(1)
    meter, slots = RolloutMeter("rollout", 8, time.monotonic, lambda: None), Slots(8, hold=True)
    engine = Holding(specs)  # type: ignore[abstract]
    loader = Loader(engine, WeightsSection(), meter, -1, slots, deltas=deltas, node_file=node_file)
    driver.send(cpu_s())
    while (asked := driver.recv()) is not None:
        if isinstance(asked, int):
            report = asyncio.run(loader.load(asked, "keep-kv"))
            ctypes.CDLL(None).malloc_trim(0)  # what is free is not held
            driver.send((report.fetched_bytes, cpu_s()))
        else:
            asyncio.run(loader.prefetch(*asked))
            driver.send(None)


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class Memory:
    """Of processes together, from now on."""

    def __init__(self, pids: Collection[int]) -> None:
        self._pids = pids
        self._before = sum(map(held_bytes, pids))
        self.peak, self._ended = 0, threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def look(self) -> int:
        now = sum(map(held_bytes, self._pids)) - self._before
        self.peak = max(self.peak, now)
        return now

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(LOOK_S):
            self.look()


def held_bytes(pid: int) -> int:
    """A process's proportional set size of anonymous memory, and of buffers that workers share."""
    total, counts = 0, False
    with open(f"/proc/{pid}/smaps", encoding="ascii", errors="replace") as maps:
        for line in maps:
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024 if counts else 0
            elif "-" in (words := line.split())[0]:  # the next mapping's first line
                counts = len(words) < 6 or words[5] == "[heap]" or "asyncrl-weights" in line
    return total


def measure(num_mb: int, workers: int, versions: int, *, shares: bool, deltas: bool) -> list[str]:
    count, draw = num_mb * MB // TENSOR_BYTES, np.random.default_rng(0)
    specs = [Spec(name=f"w{i}", dtype="bfloat16", shape=(TENSOR_BYTES // 2,)) for i in range(count)]
    layout, context = plan_layout(specs, BUCKET_BYTES), get_context("fork")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        sender = DeltaSender(Files(Path(directory))) if deltas else Files(Path(directory))
        node_file = Path(directory) / "node.json" if shares else None
        pipes = [Pipe() for _ in range(workers)]
        processes = [
            context.Process(target=worker, args=(theirs, specs, node_file, deltas), daemon=True)
            for _, theirs in pipes
        ]
        for one in processes:
            one.start()
        weights = {one.name: torch.from_numpy(draw.integers(0, 2**15, one.shape, np.int16)) for one in specs}
        all_cpu_s = [sum(ours.recv() for ours, _ in pipes)]
        memory = Memory([one.pid for one in processes])
        fetched = []
        for version in range(versions):
            for one in weights.values():
                one[draw.integers(0, len(one), int(CHANGED * len(one)))] += 1
            packing = Packing(layout)
            for name, one in weights.items():
                packing.put(name, one.view(torch.bfloat16))
            buckets = packing.seal()
            sender.keep([version - 1])
            manifest = manifest_of(buckets, version)
            refs = send(sender, manifest, buckets)
            for question in ((manifest, refs), version):
                for ours, _ in pipes:
                    ours.send(question)
                answers = [ours.recv() for ours, _ in pipes]
                memory.look()
            fetched.append(sum(size for size, _ in answers))
            all_cpu_s.append(sum(cpu_s for _, cpu_s in answers))
        after = memory.look()
        memory.end()
        for ours, _ in pipes:
            ours.send(None)
        for one in processes:
            one.join()
    later = versions - 1
    found = (
        memory.peak / (num_mb * MB),
        after / (num_mb * MB),
        (all_cpu_s[-1] - all_cpu_s[1]) / later,
        sum(fetched[1:]) / later / (num_mb * MB),
    )
    how = ["delta" if deltas else "full", "shared" if shares else "alone", str(workers)]
    return [*how, *(f"{figure:.2f}" for figure in found)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--versions", type=int, default=4)
    options = parser.parse_args()
    rows = []
    for deltas in (False, True):
        for workers in options.workers:
            for shares in (False, True):
                rows.append(measure(options.mb, workers, options.versions, shares=shares, deltas=deltas))
                print("  ".join(rows[-1]), flush=True)
    names = ["encoding", "buffers", "workers", "peak / model", "after / model", "CPU s", "fetched / model"]
    print(table(names, rows))
    print(f"\n{options.mb} MB in bfloat16; {conditions()}")


if __name__ == "__main__":
    main()
