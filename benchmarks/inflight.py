"""The tokens per second that weight syncs cost a rollout worker, by interval (K) and interrupt (drain,
recompute-kv, keep-kv).

    python benchmarks/inflight.py [--engine vllm transformers] [--k 1 4 16] [--slots 32] [--steps 32]
    [--repeat 3]
                                  [--plot inflight.png] [--json]

A worker's slots are always full: when a response ends (after 8 to --tokens tokens, uniformly), the next one
begins. First the rate without syncs is measured. A train step is then the time in which the worker samples
--step-tokens tokens per slot at that rate, as if training and rollouts were balanced, and there is a sync
every K such steps. Each case lasts --steps steps.

A sync does what a worker does in a run: it copies the buckets during generation, then loads them with the
given interrupt. A drain lets responses end while no new ones begin, so its cost is empty slots. If a sync
takes longer than K steps, the next one follows at once (then `syncs` is less than steps / K).

    lost         1 - rate / rate without syncs, both from the same repeat; the median of the repeats
    per sync     tokens that one sync costs, computed in the same way
    pause        longest stop of a sync, median (a drain's stop begins when its last response has ended)
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from engine_kit import (
    MB,
    THREADS,
    RandomModel,
    beside,
    conditions,
    make_builtin_model,
    make_random_model,
    need_vllm,
    pack,
    prompts_of,
    running_engine,
    table,
)

from asyncrl_cli.engines.port import Sampling
from asyncrl_cli.profile.schema import Interrupt
from asyncrl_cli.weights.buckets import Bucket

INTERRUPTS: tuple[Interrupt, ...] = get_args(Interrupt)
SHORTEST_TOKENS = 8
BUCKET_BYTES = 128 * MB


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """`k` 0 and no interrupt: without syncs."""

    k: int
    interrupt: str
    tokens: int
    seconds: float
    syncs: int
    pause_s: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Worker:
    """An engine whose slots are always full."""

    def __init__(self, engine: Any, model: RandomModel, buckets: list[Bucket], longest_tokens: int) -> None:
        self._engine, self._model, self._buckets, self._longest = engine, model, buckets, longest_tokens
        self._numbers = itertools.count()

    def busy(self) -> AbstractAsyncContextManager[None]:
        """Twice the slots: a free slot always finds somebody waiting."""
        return beside(self._one_after_another() for _ in range(2 * self._engine.slots))

    async def _one_after_another(self) -> None:
        while True:
            number = next(self._numbers)
            tokens = random.Random(number).randint(SHORTEST_TOKENS, self._longest)
            prompt = prompts_of(self._model, 1, seed=number)[0]
            await self._engine.generate(
                f"r{number}", prompt, Sampling(temperature=1.0, max_response_tokens=tokens), number
            )

    async def without_syncs(self, seconds: float) -> Stretch:
        before, began_s = self._engine.sampled_tokens, time.perf_counter()
        await asyncio.sleep(seconds)
        return await self._stretch(0, "", before, began_s, [])

    async def with_syncs(self, k: int, interrupt: Interrupt, step_s: float, steps: int) -> Stretch:
        """The stretch ends with the last sync's window, and later if the syncs take longer than that."""
        before, began_s = self._engine.sampled_tokens, time.perf_counter()
        pauses: list[float] = []
        now_s = began_s
        while now_s < began_s + steps * step_s:
            weights = await asyncio.to_thread(self._engine.receive, self._buckets)
            pauses.append((await self._engine.load(weights, self._engine.version + 1, interrupt)).pause_s)
            await asyncio.sleep(max(0.0, now_s + k * step_s - time.perf_counter()))
            now_s = time.perf_counter()
        return await self._stretch(k, interrupt, before, began_s, pauses)

    async def _stretch(
        self, k: int, interrupt: str, before: int, began_s: float, pauses: list[float]
    ) -> Stretch:
        """Waits for a first token, without which there would be no rate."""
        async with asyncio.timeout(60):
            while self._engine.sampled_tokens == before:  # noqa: ASYNC110  (it is counted in the engine's thread)
                await asyncio.sleep(0.001)
        seconds = time.perf_counter() - began_s
        tokens, pause_s = self._engine.sampled_tokens - before, statistics.median(pauses) if pauses else 0.0
        return Stretch(
            k=k, interrupt=interrupt, tokens=tokens, seconds=seconds, syncs=len(pauses), pause_s=pause_s
        )


async def measure(
    name: str, model: RandomModel, buckets: list[Bucket], options: argparse.Namespace
) -> list[list[Stretch]]:
    """Per repeat: each case, and a stretch without syncs before every one of them."""
    found: list[list[Stretch]] = []
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(running_engine(name, model, options.slots, options.tokens))
        worker = Worker(engine, model, buckets, options.tokens)
        await stack.enter_async_context(worker.busy())
        await worker.without_syncs(options.warm_s)
        rate = statistics.median([(await worker.without_syncs(options.warm_s)).rate for _ in range(3)])
        step_s = options.slots * options.step_tokens / rate
        print(
            f"{name}: {rate:,.0f} tokens/s without syncs, a train step takes {step_s:.3f} s",
            file=sys.stderr,
            flush=True,
        )
        for repeat in range(options.repeat):
            stretches: list[Stretch] = []
            cases = list(itertools.product(options.k, INTERRUPTS))
            for k, interrupt in cases if repeat % 2 else cases[::-1]:
                stretches.append(await worker.without_syncs(options.steps * step_s / 2))
                stretches.append(await worker.with_syncs(k, interrupt, step_s, options.steps))
            found.append(stretches)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`lost`: share of the tokens; `per_sync`: tokens."""

    engine: str
    k: int
    interrupt: str
    lost: float
    least: float
    most: float
    per_sync: float
    pause_s: float
    syncs: float


def cases_of(engine: str, repeats: list[list[Stretch]]) -> list[Case]:
    """Each stretch with syncs beside the one without them right before it."""
    pairs = [pair for stretches in repeats for pair in zip(stretches[::2], stretches[1::2], strict=True)]
    cases = []
    for k, interrupt in sorted({(synced.k, synced.interrupt) for _, synced in pairs}):
        mine = [(plain, synced) for plain, synced in pairs if (synced.k, synced.interrupt) == (k, interrupt)]
        lost = [1 - synced.rate / plain.rate for plain, synced in mine]
        per_sync = [(plain.rate - synced.rate) * synced.seconds / synced.syncs for plain, synced in mine]
        cases.append(
            Case(
                engine=engine,
                k=k,
                interrupt=interrupt,
                lost=statistics.median(lost),
                least=min(lost),
                most=max(lost),
                per_sync=statistics.median(per_sync),
                pause_s=statistics.median(synced.pause_s for _, synced in mine),
                syncs=statistics.median(synced.syncs for _, synced in mine),
            )
        )
    return cases


def plot(cases: list[Case], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    engines = list(dict.fromkeys(case.engine for case in cases))
    figure, panels = pyplot.subplots(
        1, len(engines), figsize=(5 * len(engines), 4), sharey=True, squeeze=False
    )
    for panel, engine in zip(panels[0], engines, strict=True):
        for interrupt in INTERRUPTS:
            mine = [case for case in cases if (case.engine, case.interrupt) == (engine, interrupt)]
            lost = [100 * case.lost for case in mine]
            spread = [
                [100 * (case.lost - case.least) for case in mine],
                [100 * (case.most - case.lost) for case in mine],
            ]
            panel.errorbar(
                [case.k for case in mine], lost, yerr=spread, marker="o", capsize=3, label=interrupt
            )
        panel.set_xscale("log", base=2)
        panel.set_xticks(
            sorted({case.k for case in cases}), [str(k) for k in sorted({case.k for case in cases})]
        )
        panel.axhline(0, color="grey", linewidth=0.5)
        panel.set(
            title=engine, xlabel="K: train steps between two syncs", ylabel="tokens/s lost to syncs (%)"
        )
        panel.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def case_table(cases: list[Case]) -> str:
    rows = [
        [
            case.engine,
            f"{case.k}",
            case.interrupt,
            f"{case.lost:.1%}",
            f"{case.least:.1%} - {case.most:.1%}",
            f"{case.per_sync:,.0f}",
            f"{1e3 * case.pause_s:.1f}",
            f"{case.syncs:g}",
        ]
        for case in cases
    ]
    return table(["engine", "K", "interrupt", "lost", "least - most", "per sync", "pause ms", "syncs"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--engine", nargs="+", choices=["vllm", "transformers"], default=["vllm", "transformers"]
    )
    parser.add_argument("--k", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128, help="length of the longest response")
    parser.add_argument("--step-tokens", type=int, default=16, help="tokens per slot in a train step")
    parser.add_argument("--steps", type=int, default=32, help="train steps per case")
    parser.add_argument(
        "--warm-s", type=float, default=2.0, help="four such stretches come first; three tell the rate"
    )
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument(
        "--parameters", type=int, help="a random Qwen3 of this size, instead of builtin:tiny's architecture"
    )
    parser.add_argument("--plot", type=Path, default=Path("inflight.png"))
    parser.add_argument(
        "--json", action="store_true", help="print all stretches as JSON instead of the table"
    )
    options = parser.parse_args()
    if "vllm" in options.engine:
        need_vllm(parser, "--engine transformers")
    torch.set_num_threads(THREADS)
    results: dict[str, list[list[Stretch]]] = {}
    with tempfile.TemporaryDirectory() as directory:
        made = Path(directory)
        model = (
            make_random_model(made, options.parameters) if options.parameters else make_builtin_model(made)
        )
        buckets = pack(load_weights(made), BUCKET_BYTES)
        for name in options.engine:
            results[name] = asyncio.run(measure(name, model, buckets, options))
    cases = [case for name, repeats in results.items() for case in cases_of(name, repeats)]
    plot(cases, options.plot)
    if options.json:
        plain = {
            name: [[asdict(one) for one in stretches] for stretches in repeats]
            for name, repeats in results.items()
        }
        print(json.dumps({"conditions": conditions(), "stretches": plain}))
        return
    print(case_table(cases))
    print(
        f"\n{model.parameters / 1e6:.1f} million parameters, {options.slots} slots, {options.repeat} "
        f"repeats, {conditions()}"
    )
    print(f"plot: {options.plot}")


def load_weights(directory: Path) -> dict[str, torch.Tensor]:
    """The engine's own weights: what is generated stays the same, what it costs to load them too."""
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


if __name__ == "__main__":
    main()
