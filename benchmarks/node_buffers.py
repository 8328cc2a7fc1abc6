"""What a node's rollout workers hold of the versions that they receive, together.

    python benchmarks/node_buffers.py [--mb 256] [--workers 1 2 4] [--versions 4]

Each worker is a process with the receiving side of a run (`Loader`) and an engine that holds weights of the
same size. Versions come through Ray's object store, `full` and `delta` (bfloat16, 2% of the elements changed
before each). `alone`: without the file by which a node's workers share what arrives.

    peak         proportional set sizes of all workers beyond what they had before the first version, at most:
                 a page that n of them map counts 1/n in each. Without the pages of the object store
    after        the same, once all have loaded the last version
    CPU          seconds of all workers for a version, on average, without the first
    fetched      bytes of a version that the workers fetched together, likewise
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from engine_kit import MB, conditions, table

from asyncrl_cli.engines.port import Engine, PauseReport
from asyncrl_cli.envs.slots import Slots
from asyncrl_cli.job.rank_sending import ObjectStoreSender
from asyncrl_cli.job.rollout_weights import Loader
from asyncrl_cli.measure.meters import RolloutMeter
from asyncrl_cli.profile.schema import WeightsSection
from asyncrl_cli.weights.buckets import Packing, Spec, plan_layout
from asyncrl_cli.weights.receivers import manifest_of
from asyncrl_cli.weights.senders import DeltaSender
from asyncrl_cli.weights.versions import send

TENSOR_BYTES, BUCKET_BYTES = 8 * MB, 32 * MB
CHANGED = 0.02
LOOK_S = 0.02


class Holding(Engine):
    """Copies what it loads, as engines do."""

    held: dict[str, torch.Tensor] | None = None

    async def load(self, weights: Any, version: int, interrupt: str) -> PauseReport:
        self.held = self.held or {name: torch.empty_like(one) for name, one in weights.items()}
        for name, one in weights.items():
            self.held[name].copy_(one)
        return PauseReport(load_s=0.0, pause_s=0.0)


@ray.remote(num_cpus=0)
class Worker:
    def __init__(self, specs: list[Spec], node_file: Path | None, deltas: bool) -> None:
        torch.set_num_threads(1)
        meter = RolloutMeter("rollout", 8, time.monotonic, lambda: None)
        engine = Holding()  # type: ignore[abstract]
        engine.held = {one.name: torch.ones(one.shape, dtype=torch.bfloat16) for one in specs}
        slots = Slots(8, hold=True)
        self.loader = Loader(engine, WeightsSection(), meter, -1, slots, deltas=deltas, node_file=node_file)
        self.before, self.peak = held_bytes(), 0
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        while True:
            self.peak = max(self.peak, held_bytes() - self.before)
            time.sleep(LOOK_S)

    async def prefetch(self, manifest: Any, refs: list[Any]) -> None:
        await self.loader.prefetch(manifest, refs)

    async def load(self, version: int) -> int:
        return (await self.loader.load(version, "keep-kv")).fetched_bytes or 0

    async def facts(self) -> tuple[int, int, float]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return self.peak, held_bytes() - self.before, used.ru_utime + used.ru_stime


def held_bytes() -> int:
    """The process's proportional set size without what it maps of the object store."""
    total, counts = 0, True
    with open("/proc/self/smaps", encoding="ascii", errors="replace") as maps:
        for line in maps:
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024 if counts else 0
            elif "-" in line.split(" ", 1)[0]:  # the next mapping's first line
                counts = "plasma" not in line and "/dev/shm" not in line
    return total


def measure(num_mb: int, workers: int, versions: int, *, shares: bool, deltas: bool) -> list[str]:
    count = num_mb * MB // TENSOR_BYTES
    specs = [Spec(name=f"w{i}", dtype="bfloat16", shape=(TENSOR_BYTES // 2,)) for i in range(count)]
    layout = plan_layout(specs, BUCKET_BYTES)
    sender = DeltaSender(ObjectStoreSender()) if deltas else ObjectStoreSender()
    draw = np.random.default_rng(0)
    weights = {one.name: torch.from_numpy(draw.integers(0, 2**15, one.shape, np.int16)) for one in specs}
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "node.json" if shares else None
        actors = [Worker.remote(specs, file, deltas) for _ in range(workers)]
        first = ray.get([one.facts.remote() for one in actors])
        fetched, cpu = [], [sum(cpu_s for _, _, cpu_s in first)]
        for version in range(versions):
            for one in weights.values():
                one[draw.integers(0, len(one), int(CHANGED * len(one)))] += 1
            packing = Packing(layout)
            for name, one in weights.items():
                packing.put(name, one.view(torch.bfloat16))
            buckets = packing.seal()
            sender.keep([version - 1])
            manifest, refs = (
                manifest_of(buckets, version),
                send(sender, manifest_of(buckets, version), buckets),
            )
            ray.get([one.prefetch.remote(manifest, refs) for one in actors])
            fetched.append(sum(ray.get([one.load.remote(version) for one in actors])))
            facts = ray.get([one.facts.remote() for one in actors])
            cpu.append(sum(cpu_s for _, _, cpu_s in facts))
            del packing, buckets
        for one in actors:
            ray.kill(one)
    later = versions - 1
    figures = (
        sum(peak for peak, _, _ in facts) / (num_mb * MB),
        sum(after for _, after, _ in facts) / (num_mb * MB),
        (cpu[-1] - cpu[1]) / later,
        sum(fetched[1:]) / later / (num_mb * MB),
    )
    how = ["delta" if deltas else "full", "shared" if shares else "alone", str(workers)]
    return [*how, *(f"{figure:.2f}" for figure in figures)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--versions", type=int, default=4)
    options = parser.parse_args()
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        configure_logging=False,
        object_store_memory=4 * options.mb * MB + 256 * MB,
    )
    rows = []
    for deltas in (False, True):
        for workers in options.workers:
            for shares in (False, True):
                rows.append(measure(options.mb, workers, options.versions, shares=shares, deltas=deltas))
                print("  ".join(rows[-1]), flush=True)
    ray.shutdown()
    print(
        table(["encoding", "buffers", "workers", "peak / model", "after / model", "CPU s", "fetched"], rows)
    )
    print(f"\n{options.mb} MB in bfloat16; {conditions()}")


if __name__ == "__main__":
    main()
