"""What a weight sync costs, by the number of trainer ranks and of rollout workers.

    python benchmarks/weight_sync.py [--mb 100] [--cells 1x1 2x1 4x4] [--encoding full delta] [--syncs 5]
        [--gather rows rank-0] [--changed 0.008] [--probes 0] [--engine transformers] [--models DIR] [--json]

A cell is RANKSxWORKERS; all encodings are measured in it before the next cell, so that they meet the same
other work of the machine. Ranks (gloo) and workers are the actors of a run, each a process of its own, and
Ray's object store is between them. Only the training is left out: before each sync a random share of all
elements changes by a last bit or two. A worker receives a version into its second buffer and loads it into
its engine (keep-kv; nothing runs there meanwhile). The fingerprint that it has loaded is compared with the
published one and, with `--probes`, its logprobs with the trainer's.

    stall       the gather, of the slowest rank: the trainer stands still
    rank CPU    CPU time of the rank that took most, of all its threads: gather, fingerprints, differences,
                and the copy to the object store
    send        from the end of the gather until the slowest worker has a version in its second buffer
    fetched     bytes that the node's workers fetched, once for all
    worker CPU  CPU time of the worker that took most, from the end of the gather to the end of the load
    pause       of the slowest worker, as it reports it
    memcpy      the same bytes from memory to memory in one worker, both warm, for comparison with `pause`
    rank 0      the most memory that rank 0 took beyond what it had before the first sync, and `worker` the
                same of a worker; without what either sees of the object store, which is the node's
    node        the same of all processes together, with the object store and the workers' shared buffer, at
                most, looked at every 50 ms in two further syncs

`--lora`: adapters of rank 8, which all change before each sync, and who makes weights of them: `trainer`
(lora.sync = "merged"), `worker` ("adapter", merged by the worker), `engine` ("adapter", vLLM applies them);
also how long a worker generates 16 tokens in each of 8 slots (`generate`). `none`: there are no adapters.

`--gather rank-0` has all ranks gather the whole model, which rank 0 sends, as with `disk` or `directory`.

Medians over the syncs after the first three, which touch fresh memory and send everything once. With fewer
cores than processes, these wait for each other: seconds say little then; CPU time, bytes and memory hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import statistics
import sys
import tempfile
import threading
import time
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
from engine_kit import MB, conditions, generate_all, make_random_model, need_vllm, table

from asyncrl_cli.contracts.environment import RewardSpec
from asyncrl_cli.contracts.weight_version import Published
from asyncrl_cli.job import driver_crew
from asyncrl_cli.job.rank_host import RankHost
from asyncrl_cli.job.ray.session import ray_session
from asyncrl_cli.job.rollout_host import RolloutHost
from asyncrl_cli.plan.cluster import ClusterResources, NodeResources
from asyncrl_cli.profile.loaded import load
from asyncrl_cli.profile.schema import Profile

FIRST = 3
"""Syncs that are not counted."""
LARGEST_DIFFERENCE = 0.1
"""Median of the probes' logprobs between a worker and the trainer, in bfloat16."""
SECONDS = ("stall", "rank CPU", "send", "worker CPU", "pause", "memcpy")
SIZES = ("fetched", "rank 0", "worker", "node")
LOOK_S = 0.05
SLOTS, RESPONSE_TOKENS = 8, 16
LOOKED_AT = 2
"""Further syncs, in which memory is looked at and nothing is timed."""
Figures = dict[str, float]


class Memory:
    """Of this process, without mapped files and the object store."""

    def __init__(self) -> None:
        self._before = 0
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self._before = self.most_bytes()

    def most_bytes(self) -> int:
        """The peak, minus what it was in the beginning."""
        lines = Path("/proc/self/status").read_text().splitlines()
        fields = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.endswith("kB")}
        store = sum(one.rss for one in psutil.Process().memory_maps() if "plasma" in one.path)
        return 1024 * (fields["VmHWM"] - fields["RssFile"]) - store - self._before


def node_bytes() -> int:
    """Anonymous and shared memory of this process's descendants, each page once (proportional set sizes)."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        with suppress(OSError):  # it has ended
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon", "Pss_Shmem")))
    return 1024 * total


class NodeMemory:
    """The most that `node_bytes` finds while it is entered."""

    most_bytes = 0

    def __enter__(self) -> NodeMemory:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(LOOK_S):
            self.most_bytes = max(self.most_bytes, node_bytes())


class Rank(RankHost):
    @ray.method(concurrency_group="main")
    def change(self, version: int, share: float) -> None:
        import torch

        if version == 0:
            self.memory = Memory()
            return
        draw = torch.Generator().manual_seed(1000 * version + self._rank)
        shards = self.trainer.model.locals()
        adapters = [shard for name, shard in shards.items() if "lora_" in name]
        for shard in adapters:
            shard += 1e-3 * torch.randn(shard.shape, generator=draw)
        for shard in [] if adapters else shards.values():
            flat = shard.view(-1)
            flat[torch.randint(len(flat), (int(share * len(flat)),), generator=draw)] *= 1 + 2**-7

    @ray.method(concurrency_group="main")
    def used(self) -> Figures:
        return {"cpu": time.process_time(), "memory": self.memory.most_bytes()}


class WholeRank(Rank):
    """All ranks gather the model, and rank 0 sends it."""

    def _make_trainer(self, init_method: str) -> None:
        from asyncrl_cli.train import policy_model

        policy_model.sends_rows = lambda profile: False
        super()._make_trainer(init_method)


class Worker(RolloutHost):
    async def began(self) -> None:
        self.memory = Memory()

    async def used(self) -> Figures:
        return {"cpu": time.process_time(), "memory": self.memory.most_bytes()}

    async def generate_s(self) -> float:
        """As many full responses as there are slots, the second time, which compiles nothing."""
        prompts = [[3 + row, *range(4, 20)] for row in range(SLOTS)]
        await generate_all(self._engine, prompts, RESPONSE_TOKENS, "first")
        taken_s, _ = await generate_all(self._engine, prompts, RESPONSE_TOKENS)
        return taken_s

    async def memcpy_s(self, num_bytes: int) -> float:
        source, target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
        began_s = time.perf_counter()
        np.copyto(target, source)
        return time.perf_counter() - began_s


async def all_of(calls: Any) -> list[Any]:
    return list(await asyncio.gather(*calls))


async def sync(crew: driver_crew.Crew, version: int, changed: float, newest: list[Published]) -> Figures:
    """`newest`: the version that workers hold, which must live until the next one is gathered."""
    ranks, workers = crew.trainer.actors, [worker.actor for worker in crew.workers]
    await all_of(rank.change.remote(version, changed) for rank in ranks)
    ranks_before = await all_of(rank.used.remote() for rank in ranks)
    stall_s, _ = await crew.trainer.gather(version)
    workers_before = await all_of(worker.used.remote() for worker in workers)
    began_s = time.monotonic()
    newest[:] = [published := await crew.trainer.publish(version)]
    await all_of(worker.prefetch(published) for worker in crew.workers)
    send_s = time.monotonic() - began_s
    loads = await all_of(worker.load(version, "keep-kv") for worker in crew.workers)
    for one in loads:
        difference = one.logprob_abs_diff_median
        if one.fingerprint != published.fingerprint or not (difference or 0.0) <= LARGEST_DIFFERENCE:
            raise SystemExit(f"version {version}: a worker has other weights than were sent: {one}")
    ranks_after = await all_of(rank.used.remote() for rank in ranks)
    workers_after = await all_of(worker.used.remote() for worker in workers)

    def most_cpu_s(before: list[Figures], after: list[Figures]) -> float:
        return max(one["cpu"] - old["cpu"] for old, one in zip(before, after, strict=True))

    return {
        "stall": stall_s,
        "rank CPU": most_cpu_s(ranks_before, ranks_after),
        "send": send_s,
        "worker CPU": most_cpu_s(workers_before, workers_after),
        "pause": max(one.pause_s for one in loads),
        "fetched": max(one.fetched_bytes or 0 for one in loads),
        "rank 0": ranks_after[0]["memory"],
        "worker": max(one["memory"] for one in workers_after),
    }


async def measured(order: driver_crew.CrewOrder, num_bytes: int, options: argparse.Namespace) -> Figures:
    async with driver_crew.started_crew(order) as crew:
        workers = [worker.actor for worker in crew.workers]
        await all_of(worker.began.remote() for worker in workers)
        newest, timed, before_bytes = list[Published](), FIRST + options.syncs, node_bytes()
        found = [await sync(crew, version, options.changed, newest) for version in range(timed)]
        median = {key: statistics.median(one[key] for one in found[FIRST:]) for key in found[0]}
        with NodeMemory() as memory:
            for version in range(timed, timed + LOOKED_AT):
                await sync(crew, version, options.changed, newest)
        median["node"] = memory.most_bytes - before_bytes
        if options.lora != ["none"]:
            median["generate"] = await workers[0].generate_s.remote()
        copies_s = [await workers[0].memcpy_s.remote(num_bytes) for _ in range(3)]
    return median | {"memcpy": statistics.median(copies_s)}


def profile_of(
    model_dir: Path, ranks: int, workers: int, encoding: str, merges: str, options: Any
) -> Profile:
    sets = {
        "model.path": str(model_dir),
        "model.dtype": "bfloat16",
        "placement.trainer_workers": ranks,
        "placement.device": "cpu",
        "rollout.engine": options.engine,
        "rollout.workers": workers,
        "rollout.slots": SLOTS,
        "rollout.max_response_tokens": RESPONSE_TOKENS,
        "weights.encoding": encoding,
        "weights.gather_bucket_size_mb": 32,
        "weights.probe_sequences": options.probes,
        "task.reward_workers": 1,
    }
    if merges != "none":
        sets |= {"lora.rank": 8, "lora.sync": "merged" if merges == "trainer" else "adapter"}
    if merges == "worker" and options.engine == "vllm":
        sets["rollout.engine_args.enable_lora"] = False
    return load("base", [f"{key}={json.dumps(value)}" for key, value in sets.items()], environ={}).profile


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=int, nargs="+", default=[100], help="of the model in bfloat16")
    cells = [f"{ranks}x{workers}" for ranks in (1, 2, 4) for workers in (1, 2, 4)]
    parser.add_argument("--cells", nargs="+", default=cells, help="RANKSxWORKERS")
    parser.add_argument("--encoding", nargs="+", choices=["full", "delta"], default=["full", "delta"])
    parser.add_argument("--gather", nargs="+", choices=["rows", "rank-0"], default=["rows"])
    parser.add_argument(
        "--lora", nargs="+", choices=["none", "trainer", "worker", "engine"], default=["none"]
    )
    parser.add_argument("--syncs", type=int, default=5)
    parser.add_argument("--changed", type=float, default=0.008, help="share of the elements")
    parser.add_argument("--probes", type=int, default=0)
    parser.add_argument("--engine", choices=["vllm", "transformers"], default="transformers")
    parser.add_argument("--models", type=Path, help="directory of random models, made where one is missing")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.engine == "vllm":
        need_vllm(parser, "--engine transformers")
    logging.getLogger("asyncrl_cli").setLevel(logging.ERROR)
    driver_crew.RolloutHost = Worker  # type: ignore[misc]
    cluster = ClusterResources(nodes=(NodeResources(name="one", cpus=64, gpus=0),), elastic_cpus=True)
    results = []
    for mb in options.mb:
        with tempfile.TemporaryDirectory() as name:
            directory = Path(name)
            model = (options.models or directory).absolute() / f"{mb}-mb"
            if not model.exists():
                make_random_model(model, mb * MB // 2)
            num_bytes = (model / "model.safetensors").stat().st_size // 2
            for cell, gather, merges, encoding in product(
                options.cells, options.gather, options.lora, options.encoding
            ):
                ranks, workers = map(int, cell.split("x"))
                driver_crew.RankHost = Rank if gather == "rows" else WholeRank  # type: ignore[misc]
                profile = profile_of(model, ranks, workers, encoding, merges, options)
                with ray_session(profile, cluster=cluster, model_dir=model) as plan:
                    order = driver_crew.CrewOrder(
                        plan=plan,
                        profile=profile,
                        model_dir=model,
                        further={},
                        run_dir=directory / "run",
                        log_dir=directory / "logs",
                        reward=RewardSpec(kind="exact-match"),
                    )
                    figures = asyncio.run(measured(order, num_bytes, options))
                sides = {"model MB": mb, "encoding": encoding, "gather": gather, "lora": merges}
                results.append(sides | {"ranks": ranks, "workers": workers} | figures)
                print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    if options.json:
        print(json.dumps({"conditions": conditions(), "results": results}))
        return
    head = ("model MB", "encoding", "gather", "lora", "ranks", "workers")
    seconds = (*SECONDS, *(["generate"] if "generate" in results[0] else []))
    rows = [
        [
            *(str(one[key]) for key in head),
            *(f"{one[key]:.2f}" for key in seconds),
            *(f"{one[key] / MB:.1f}" for key in SIZES),
        ]
        for one in results
    ]
    print(table([*head, *(f"{key} s" for key in seconds), *(f"{key} MB" for key in SIZES)], rows))
    print(f"\n{options.changed:.1%} of the elements changed; {options.syncs} syncs; {conditions()}")


if __name__ == "__main__":
    main()
