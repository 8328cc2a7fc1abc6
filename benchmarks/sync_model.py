"""SIMULATED: what a sync takes, by the formulas of `asyncrl bench --simulate` (simulate/sync_costs.py), and
how `nccl` would scale with other orders of sending.

    python benchmarks/sync_model.py [--changed 0.02] [--draws 200]

Bandwidths: of data sheets (NVIDIA H100: PCIe 5.0 x16, 64 GB/s in each direction; DGX H100: a 400 Gb/s adapter
for each GPU), of which REACHED is assumed to be reached. Assumed: 100 Gb/s of Ethernet for Ray's objects.
What a thread copies, compares and applies is measured here.

Half of the GPUs train, half generate. A dash: training does not fit (12 bytes per parameter, 80 GB).

The second table has n workers of 8 GPUs each, which ask for a version within SPREAD_S, on the virtual clock.
Each dies with the given chance in the middle of its transfer, and asks again after RESTART_S. NCCL ends a
broadcast only with the processes that take part in it, so all of these are restarted.

    serial    one after another, as it is
    all       rank 0 sends to all at once, when the last has asked
    waiting   rank 0 sends to all that have asked, then to those that have asked meanwhile
    relays    each round, everybody that has the version sends it to one that has not
    store     `object-store` with `full`: each has it from its node, and pauses for its own copy
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from engine_kit import MB, conditions, table

from asyncrl_cli.job.host_process import GETS_AHEAD
from asyncrl_cli.profile.loaded import load
from asyncrl_cli.simulate.sync_costs import sync_times
from asyncrl_cli.simulate.workload import Links, Syncing
from asyncrl_cli.simulate.world import run_virtual
from asyncrl_cli.weights.buckets import Bucket, Spec, fingerprint, plan_layout
from asyncrl_cli.weights.deltas import applied, difference
from asyncrl_cli.weights.receivers import SharedWeights

REACHED = 0.8
DEVICE, GROUP, NODE = 64e9 * REACHED, 50e9 * REACHED, 12.5e9 * REACHED
MODELS = {"7B": (7.6e9, 1), "32B": (32.8e9, 4), "235B": (235e9, 8)}
"""Parameters, and GPUs of a rollout worker."""
GPUS = (8, 32, 128, 512)
WORKERS = (1, 2, 4, 8, 16, 32, 64)
GPU_BYTES, TRAINED_BYTES = 80e9, 12
WAYS = {
    "object-store, full": [],
    "object-store, delta": ["weights.encoding=delta"],
    "nccl": ["weights.transport=nccl", "rollout.engine=vllm"],
}
SPREAD_S, RESTART_S = 2.0, 120.0


def measured(changed: float) -> dict[str, float]:
    """Bytes per second of one thread, with a bucket of 64 MB in bfloat16."""
    rng = np.random.default_rng(0)
    layout = plan_layout([Spec(name="w", dtype="bfloat16", shape=(32 * MB,))], 64 * MB)[0]
    old = Bucket(data=rng.integers(0, 255, 64 * MB, np.uint8), entries=layout)
    new = Bucket(data=old.data.copy(), entries=layout)
    values = new.data.view(np.uint16)
    values[rng.integers(0, len(values), int(changed / 2 * len(values)))] += 1
    held, delta = SharedWeights([old]), difference(new, old, 0)
    assert delta is not None

    def rate(call: Callable[[], object]) -> float:
        taken = []
        for _ in range(5):
            began_s = time.thread_time()
            call()
            taken.append(time.thread_time() - began_s)
        return 64 * MB / statistics.median(taken)

    return {
        "copy": rate(lambda: (fingerprint(new), SharedWeights([new]))),
        "compare": rate(lambda: difference(new, old, 0)),
        "apply": GETS_AHEAD * rate(lambda: applied(delta, held)),
    }


def row(model: str, gpus: int, links: Links) -> list[str]:
    parameters, worker_gpus = MODELS[model]
    cells = [model, str(gpus)]
    for way, sets in WAYS.items():
        if TRAINED_BYTES * parameters / (gpus // 2) > GPU_BYTES or worker_gpus > gpus // 2:
            return [*cells, "-", "-", "-"]
        shape = ["model.dtype=bfloat16", "placement.device=cuda", *sets]
        profile, workers = load("partial-rollout", shape, environ={}).profile, gpus // 2 // worker_gpus
        rates = {f"{name}_bytes_per_s": 1.0 for name in ("gather", "send", "load")}
        syncing = Syncing(parameter_bytes=2 * parameters, **rates)
        found = sync_times(syncing, links, profile, ranks=gpus // 2, workers=workers, worker_gpus=worker_gpus)
        turns = workers if way == "nccl" else 1
        held_by_all_s = sum(found) + (turns - 1) * found.load_s
        cells.append(shown([found.gather_s, held_by_all_s, found.load_s]))
    return cells


def shown(figures: Iterable[float]) -> str:
    return " / ".join(f"{one:.2g}" if one < 99.5 else f"{one:.0f}" for one in figures)


class Fleet:
    """Workers that ask for a version at random times."""

    def __init__(self, workers: int, chance: float, rng: random.Random) -> None:
        self.workers, self.chance, self.rng = workers, chance, rng
        self.waiting: list[int] = []
        self.held: set[int] = set()
        self.paused_s = self.restarts = 0.0
        self._asked = asyncio.Event()

    async def run(self, choose: Choice, seconds: float) -> None:
        """`choose(fleet)`: the workers of each of the next broadcasts, which run side by side."""
        async with asyncio.TaskGroup() as tasks:
            for worker in range(self.workers):
                tasks.create_task(self._ask(self.rng.random() * SPREAD_S, worker))
            while len(self.held) < self.workers:
                if not self.waiting or not (groups := choose(self)):
                    self._asked.clear()
                    await self._asked.wait()
                    continue
                self.waiting = [one for one in self.waiting if not any(one in group for group in groups)]
                await asyncio.gather(*(self._broadcast(group, seconds, tasks) for group in groups))

    async def _ask(self, after_s: float, worker: int) -> None:
        await asyncio.sleep(after_s)
        self.waiting.append(worker)
        self._asked.set()

    async def _broadcast(self, group: Sequence[int], seconds: float, tasks: asyncio.TaskGroup) -> None:
        dies = self.rng.random() < 1 - (1 - self.chance) ** len(group)
        took_s = seconds * (self.rng.random() if dies else 1.0)
        await asyncio.sleep(took_s)
        self.paused_s += took_s * len(group)
        for worker in group:
            if dies:
                self.restarts += 1
                tasks.create_task(self._ask(RESTART_S, worker))
            else:
                self.held.add(worker)


Choice = Callable[[Fleet], list[list[int]]]
ORDERS: dict[str, Choice] = {
    "serial": lambda fleet: [fleet.waiting[:1]],
    "all": lambda fleet: [fleet.waiting] if len(fleet.waiting) == fleet.workers else [],
    "waiting": lambda fleet: [fleet.waiting],
    "relays": lambda fleet: [[one] for one in fleet.waiting[: 1 + len(fleet.held)]],
    "store": lambda fleet: [[one] for one in fleet.waiting],
}


def simulated(order: str, workers: int, size: float, chance: float, draws: int) -> str:
    """Seconds until all hold the version / mean pause of a worker / restarts; means over the draws."""
    seconds = size / 8 / DEVICE if order == "store" else size / GROUP

    async def one(seed: int) -> tuple[float, float, float]:
        fleet = Fleet(workers, chance, random.Random(seed))
        await fleet.run(ORDERS[order], seconds)
        return asyncio.get_running_loop().time(), fleet.paused_s / workers, fleet.restarts

    figures = zip(*(run_virtual(one(seed)) for seed in range(draws)), strict=True)
    return shown(statistics.fmean(each) for each in figures)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--changed", type=float, default=0.02, help="bytes of a delta, relative to all")
    parser.add_argument("--draws", type=int, default=200)
    options = parser.parse_args()
    threads = measured(options.changed)
    print("GB/s of a thread:", ", ".join(f"{name} {rate / 1e9:.2f}" for name, rate in threads.items()))
    links = Links(
        device_bytes_per_s=DEVICE,
        node_bytes_per_s=NODE,
        group_bytes_per_s=GROUP,
        changed_ratio=options.changed,
        **{f"{name}_bytes_per_s": rate for name, rate in threads.items()},
    )
    print("\nSIMULATED: seconds that the trainer stalls / until all workers hold it / that a worker pauses\n")
    print(table(["model", "GPUs", *WAYS], [row(model, gpus, links) for model in MODELS for gpus in GPUS]))
    for model, chance in itertools.product(("32B", "235B"), (0.0, 0.001)):
        print(f"\nSIMULATED: {model}, {chance:.1%} die: seconds until all hold it / mean pause / restarts\n")
        size = 2 * MODELS[model][0]
        rows = [
            [str(n), *(simulated(order, n, size, chance, options.draws) for order in ORDERS)] for n in WORKERS
        ]
        print(table(["workers", *ORDERS], rows))
    print(f"\n{conditions()}")


if __name__ == "__main__":
    main()
