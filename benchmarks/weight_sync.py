"""The cost of a weight sync in its three phases, compared with a memcpy of the same bytes and with a naive
sync.

    python benchmarks/weight_sync.py [--mb 1 8 64 256 512] [--engine vllm transformers] [--repeat 5]
    [--running 0] [--json]

For each size, a Qwen3 with that many MB of random float32 weights is trained, published and loaded by the
same parts as in a run:

    gather       PolicyTrainer.gather: full parameters into fresh buckets, and the probes' logprobs. The
                 trainer stands still
    send         fingerprints and ray.put (during training), ray.get, fingerprints again and the copy to where
                 the engine loads from (during generation)
    load         the engine's own load: weights into the running model
    stall        a worker's stall: from the beginning to the end of the pause (PauseReport.pause_s; interrupt
                 keep-kv)
    zero         the engine's pause and resume, with nothing in between
    memcpy       the same bytes from memory to memory, both warm
    packing      the part of load in which vLLM's CPU layers make their own layout of the weights (none on a
                 GPU)
    fingerprint  the part of send in which the worker compares the fingerprints of all bytes. The trainer
                 computes the same ones
    probe        the engine's logprobs of the trainer's probes, after the load. vLLM scores them during
                 generation; the embedded engine stands still for them, which is included in a run's
                 sync/pause_s but not in `stall`
    trainer      stall of the trainer: gather, and how much later its next work ends because a sync is sent at
                 the same time
    naive        state_dict() through one Ray object and then into the engine, with both sides waiting: the
                 stall of both

Goal: (stall - zero) / memcpy <= 1.5: `x memcpy`. Seconds mean little on a machine that others use, so `x
memcpy CPU` is the same in CPU seconds of the thread that loads (its pause costs none). After each load the
engine scores the trainer's probes; the benchmark fails if the logprobs differ. Figures are medians over the
repeats, in which all sides take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from engine_kit import (
    MB,
    THREADS,
    RandomModel,
    beside,
    conditions,
    make_random_model,
    need_vllm,
    pack,
    prompts_of,
    running_engine,
    table,
)

from asyncrl_cli.engines.port import Sampling
from asyncrl_cli.profile.schema import ProcessPlace, Profile
from asyncrl_cli.train.policy_trainer import PolicyTrainer
from asyncrl_cli.weights.receivers import verified
from asyncrl_cli.weights.versions import mean_abs_diff

COPIES_HELD = 8
"""Of the weights at once: trainer, buckets, two in the object store, received, in the engine, naive
copies."""
GOAL = 1.5
LARGEST_DIFFERENCE = 1e-3
RESPONSE_TOKENS = 512
Figures = dict[str, float]
"""Seconds of one repeat, by name."""


class Rest:
    """A trainer that goes on: small matrix products, and how much longer they took than without company."""

    def __init__(self) -> None:
        self._matrix = torch.rand(192, 192)
        self._usual_s = statistics.median(self._one_s() for _ in range(100))

    def lost_s(self, beside: threading.Thread) -> float:
        """While `beside` runs: the time that the products made in it should not have taken."""
        beside.start()
        began_s, made = time.perf_counter(), 0
        while beside.is_alive():
            self._one_s()
            made += 1
        return max(0.0, time.perf_counter() - began_s - made * self._usual_s)

    def _one_s(self) -> float:
        began_s = time.perf_counter()
        self._matrix @ self._matrix
        return time.perf_counter() - began_s


def memcpy(source: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> Figures:
    taken: list[tuple[float, float]] = []
    for _ in range(3):
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        np.copyto(target, source)
        taken.append((time.perf_counter() - began_s, time.thread_time() - began_cpu_s))
    return {
        "memcpy": statistics.median(wall for wall, _ in taken),
        "memcpy_cpu": statistics.median(cpu for _, cpu in taken),
    }


async def zero_byte_pause_s(engine: Any) -> float:
    """What the engine needs to stop and go on, with nothing between."""
    began_s = time.perf_counter()
    if hasattr(engine, "llm"):
        from asyncrl_cli.engines.vllm.worker_transports import paused

        async with paused(engine.llm, "keep-kv"):
            pass
    else:
        await asyncio.to_thread(_pause, engine)
    return time.perf_counter() - began_s


def _pause(engine: Any) -> None:
    with engine.manager.pause():
        pass


def other_weights(trainer: PolicyTrainer) -> None:
    """Far enough from those before for the probes to tell them apart."""
    for shard in trainer.model.locals().values():
        shard.add_(torch.randn_like(shard), alpha=0.01)


async def sync(engine: Any, trainer: PolicyTrainer, version: int) -> Figures:
    """One sync as a run makes it; trainer and worker are one process here, and Ray's object store is between
    them."""
    import ray

    gather_s = await asyncio.to_thread(trainer.gather, version)
    published: list[Any] = []

    def publish() -> None:
        manifest, buckets = trainer.published(version)
        published.extend((manifest, [ray.put(bucket) for bucket in buckets]))

    rest = Rest()
    began_s = time.perf_counter()
    lost_s = await asyncio.to_thread(rest.lost_s, threading.Thread(target=publish))
    publish_s = time.perf_counter() - began_s
    manifest, refs = published
    verify_s = 0.0

    def receive() -> Any:
        nonlocal verify_s
        buckets = ray.get(refs)
        began_s = time.perf_counter()
        list(verified(buckets, manifest))
        verify_s = time.perf_counter() - began_s
        return engine.receive(buckets)

    began_s = time.perf_counter()
    weights = await asyncio.to_thread(receive)
    receive_s = time.perf_counter() - began_s
    await load_seconds(engine)
    began_cpu_s = time.process_time()
    report = await engine.load(weights, version, "keep-kv")
    here = {"packing": 0.0, "worker_load_cpu": time.process_time() - began_cpu_s}
    there = await load_seconds(engine)
    began_s = time.perf_counter()
    scores = await engine.score([list(tokens) for tokens in manifest.probe_tokens], manifest.temperature)
    score_s = time.perf_counter() - began_s
    difference = mean_abs_diff(scores.logprobs, manifest.probe_logprobs)
    if not difference <= LARGEST_DIFFERENCE:
        raise SystemExit(
            f"version {version}: the engine's logprobs differ from the trainer's by {difference}"
        )
    return {
        "gather": gather_s,
        "send": publish_s + receive_s,
        "load": report.load_s,
        "stall": report.pause_s,
        "fingerprint": verify_s,
        "probe": score_s,
        "trainer": gather_s + lost_s,
    } | (there or here)


async def naive(engine: Any, trainer: PolicyTrainer, version: int) -> Figures:
    """All weights as one object, in the way of a first attempt: nobody goes on before the engine has them."""
    import ray

    began_s = time.perf_counter()
    state = dict(trainer.model.sent())
    arrived = await asyncio.to_thread(ray.get, ray.put(state))
    weights = await asyncio.to_thread(engine.receive, pack(arrived, 2048 * MB))
    await engine.load(weights, version, "keep-kv")
    return {"naive": time.perf_counter() - began_s}


async def load_seconds(engine: Any) -> Figures:
    """Of vLLM's worker, since it was asked last; nothing of an engine that loads in this process."""
    return dict((await engine.llm.collective_rpc("load_seconds"))[0]) if hasattr(engine, "llm") else {}


async def measure(
    name: str, model: RandomModel, trainer: PolicyTrainer, options: argparse.Namespace
) -> list[Figures]:
    """The first sync is not among the results: it touches memory that nobody had yet."""
    extension = {"worker_extension_cls": "reload_times.ReloadTimes"} if name == "vllm" else {}
    source, target = np.ones(model.num_bytes, np.uint8), np.ones(model.num_bytes, np.uint8)
    found: list[Figures] = []
    async with (
        running_engine(name, model, max(options.running, 4), RESPONSE_TOKENS, **extension) as engine,
        beside(keep_running(engine, model, row) for row in range(options.running)),
    ):
        if name == "vllm":
            await engine.llm.collective_rpc("watch_loads")
        for repeat in range(options.repeat + 1):
            version = 2 * repeat + 1
            figures = memcpy(source, target)
            figures["zero"] = await zero_byte_pause_s(engine)
            other_weights(trainer)
            figures |= await sync(engine, trainer, version)
            figures |= await naive(engine, trainer, version + 1)
            found.append(figures)
    return found[1:]


async def keep_running(engine: Any, model: RandomModel, row: int) -> None:
    prompt = prompts_of(model, 1, seed=row)[0]
    sampling = Sampling(temperature=1.0, max_response_tokens=RESPONSE_TOKENS)
    while True:
        await engine.generate(f"running-{row}", prompt, sampling, row)


@contextmanager
def object_store(num_bytes: int) -> Iterator[None]:
    """A local Ray whose store holds two versions and the naive way's object, whatever cluster this machine
    belongs to."""
    import ray

    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        configure_logging=False,
        object_store_memory=max(3 * num_bytes + 64 * MB, 128 * MB),
    )
    try:
        yield
    finally:
        ray.shutdown()


def over_memcpy(figures: Figures) -> float:
    return (figures["stall"] - figures["zero"]) / figures["memcpy"]


def over_memcpy_cpu(figures: Figures) -> float:
    return figures["worker_load_cpu"] / figures["memcpy_cpu"]


COLUMNS = (
    "gather",
    "send",
    "load",
    "stall",
    "zero",
    "memcpy",
    "packing",
    "fingerprint",
    "probe",
    "trainer",
    "naive",
)


def row_of(model: RandomModel, name: str, found: list[Figures]) -> list[str]:
    median = {key: statistics.median(figures[key] for figures in found) for key in COLUMNS}
    ratios = [
        statistics.median(ratio(figures) for figures in found) for ratio in (over_memcpy, over_memcpy_cpu)
    ]
    gain = statistics.median(figures["naive"] / figures["stall"] for figures in found)
    cells = [f"{1e3 * median[key]:.1f}" for key in COLUMNS]
    return [name, f"{model.num_bytes / MB:.1f}", *cells, *(f"{ratio:.1f}" for ratio in ratios), f"{gain:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mb", type=float, nargs="+", default=[1, 8, 64, 256, 512], help="2048: over 24 GB with vLLM"
    )
    parser.add_argument(
        "--engine", nargs="+", choices=["vllm", "transformers"], default=["vllm", "transformers"]
    )
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument(
        "--running", type=int, default=0, metavar="SEQUENCES", help="sequences generated meanwhile"
    )
    parser.add_argument(
        "--json", action="store_true", help="print all repeats in seconds as JSON instead of the table"
    )
    options = parser.parse_args()
    if "vllm" in options.engine:
        need_vllm(parser, "--engine transformers")
    torch.set_num_threads(THREADS)
    rows, results = [], []
    for megabytes in options.mb:
        needed, available = COPIES_HELD * megabytes * MB, psutil.virtual_memory().available
        if needed > available:
            parser.error(
                f"{megabytes} MB take about {needed / 2**30:.1f} GiB of memory, "
                f"{available / 2**30:.1f} GiB are free"
            )
        with tempfile.TemporaryDirectory() as directory, object_store(int(megabytes * MB)):
            model = make_random_model(Path(directory), int(megabytes * MB / 4))
            place, meeting = ProcessPlace(model_dir=directory, threads=THREADS), f"file://{directory}/meet"
            trainer = PolicyTrainer(Profile(), place, rank=0, init_method=meeting, total_optimizer_steps=1)
            for name in options.engine:
                found = asyncio.run(measure(name, model, trainer, options))
                results.append({"engine": name, "bytes": model.num_bytes, "seconds": found})
                rows.append(row_of(model, name, found))
                print("  ".join(rows[-1]), file=sys.stderr, flush=True)
            trainer.close()
    if options.json:
        print(json.dumps({"conditions": conditions(), "results": results}))
        return
    print(
        "milliseconds; medians\n"
        + table(["engine", "MB", *COLUMNS, "x memcpy", "x memcpy CPU", "naive/stall"], rows)
    )
    print(f"\nx memcpy: (stall - zero) / memcpy, goal <= {GOAL}. {options.repeat} repeats, {conditions()}")


if __name__ == "__main__":
    main()
