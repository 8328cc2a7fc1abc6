"""Tokens per second of both rollout engines, compared with vLLM's own offline `LLM.generate` on the same
work.

    python benchmarks/engines.py [--model builtin random] [--sequences 1 8 64] [--tokens 128] [--repeat 5]
                                 [--stream-interval 1 8] [--parameters 80000000] [--no-vllm] [--json]

Within each repeat all sides generate the same number of tokens, on one compute thread per process, one side
after the other (in reverse order in every second repeat). The table has medians over the repeats. The sides:

    transformers   TransformersEngine, the embedded engine
    bare           a static batch through the same model: no admission, no versions, no stop. The embedded engine's ceiling
    vllm/N         VllmEngine as in a run, with logprobs; vLLM delivers a response's tokens every N tokens
    ceiling        vLLM's LLM.generate with the same logprobs and seeds; it delivers whole responses
    no logprobs    the same without logprobs, which a trainer would need

The second table shows the cost of our path: the ratio of vllm/N to the ceiling of the same repeat, as the
median over the repeats. It also shows the ratio of tokens per CPU-second of all processes of a side, which is
what counts on a machine that others use. `random` is a Qwen3 with random weights, `builtin` is builtin:tiny's
architecture, also random.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from engine_kit import (
    RandomModel,
    conditions,
    generate_all,
    made_of,
    make_builtin_model,
    make_random_model,
    need_vllm,
    prompts_of,
    running_engine,
    table,
)

RANDOM_VOCABULARY = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Of one side in one repeat: tokens per second of the clock, and of the CPUs."""

    wall: float
    cpu: float


Rates = dict[str, list[Rate]]
"""In each repeat, by side."""


class Processes:
    """The processes of each side: those that its engine started, and this one."""

    def __init__(self) -> None:
        self._this = psutil.Process()
        self._by_side: dict[str, list[psutil.Process]] = {}

    def started(self, side: str) -> None:
        """Call it after each engine's start: what is new is its own."""
        known = [process for processes in self._by_side.values() for process in processes]
        self._by_side[side] = [child for child in self._this.children(recursive=True) if child not in known]

    def cpu_s(self, side: str) -> float:
        """Of this process to the nanosecond; of others in the system's ticks of 10 ms, which short work may
        not reach."""
        theirs = [process.cpu_times() for process in self._by_side[side]]
        return time.process_time() + sum(times.user + times.system for times in theirs)


class Ceiling:
    """vLLM's offline engine, started with the very arguments of ours."""

    def __init__(self, model: RandomModel, slots: int, tokens: int) -> None:
        from asyncrl_cli.engines.vllm import launch as vllm_launch

        made = made_of(model, slots, tokens)
        vllm_launch.set_environment(*made)
        from vllm import LLM

        self._llm = LLM(**vllm_launch.engine_arguments(*made))
        self.generate(prompts_of(model, min(slots, 4)), 4, logprobs=True)

    def generate(self, prompts: list[list[int]], tokens: int, *, logprobs: bool) -> float:
        """Seconds. Every sequence has a seed of its own, as ours have."""
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        parameters = [
            SamplingParams(
                temperature=1.0,
                max_tokens=tokens,
                seed=row,
                detokenize=False,
                logprobs=0 if logprobs else None,
                flat_logprobs=logprobs,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            for row in range(len(prompts))
        ]
        asked: Any = [tokens_input(prompt) for prompt in prompts]
        began_s = time.perf_counter()
        outputs = self._llm.generate(asked, parameters, use_tqdm=False)
        taken_s = time.perf_counter() - began_s
        assert all(len(output.outputs[0].token_ids) == tokens for output in outputs)
        return taken_s

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


class Bare:
    """A plain loop of forward passes with a dynamic cache."""

    def __init__(self, model: RandomModel) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(model.directory, dtype=torch.float32).eval()

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], num_tokens: int) -> float:
        from transformers import DynamicCache

        tokens_BT, cache = torch.tensor(prompts), DynamicCache(config=self._model.config)
        began_s = time.perf_counter()
        for _ in range(num_tokens):
            logits_BV = self._model(
                input_ids=tokens_BT, past_key_values=cache, use_cache=True, logits_to_keep=1
            ).logits[:, -1]
            logprobs_BV = logits_BV.log_softmax(-1)
            tokens_BT = torch.multinomial(logprobs_BV.exp(), 1)
            logprobs_BV.gather(1, tokens_BT).tolist()
        return time.perf_counter() - began_s


async def measure(model: RandomModel, options: argparse.Namespace) -> dict[int, Rates]:
    """All engines are up at once; who does not generate waits."""
    slots = max(options.sequences)
    rates: dict[int, Rates] = {count: {} for count in options.sequences}
    processes = Processes()
    async with AsyncExitStack() as stack:
        engines = {
            "transformers": await stack.enter_async_context(
                running_engine("transformers", model, slots, options.tokens)
            )
        }
        processes.started("transformers")
        processes.started("bare")
        bare = Bare(model)
        sides = ["transformers", "bare"]
        if options.vllm:
            for interval in options.stream_interval:
                starting = running_engine("vllm", model, slots, options.tokens, stream_interval=interval)
                engines[f"vllm/{interval}"] = await stack.enter_async_context(starting)
                processes.started(f"vllm/{interval}")
            ceiling = await asyncio.to_thread(Ceiling, model, slots, options.tokens)
            stack.callback(ceiling.close)
            processes.started("ceiling")
            sides = [*engines, "bare", "ceiling", "no logprobs"]
        for repeat in range(options.repeat):
            for count in options.sequences:
                for side in sides if repeat % 2 else sides[::-1]:
                    prompts = prompts_of(model, count, seed=f"{side} {repeat} {count}")
                    mine = "ceiling" if side == "no logprobs" else side
                    began_cpu_s = processes.cpu_s(mine)
                    if side in engines:
                        taken_s, _ = await generate_all(engines[side], prompts, options.tokens)
                    elif side == "bare":
                        taken_s = bare.generate(prompts, options.tokens)
                    else:
                        taken_s = ceiling.generate(prompts, options.tokens, logprobs=side == "ceiling")
                    made = count * options.tokens
                    rate = Rate(wall=made / taken_s, cpu=made / (processes.cpu_s(mine) - began_cpu_s))
                    rates[count].setdefault(side, []).append(rate)
                print(
                    f"  repeat {repeat + 1} of {options.repeat}, {count} sequences",
                    file=sys.stderr,
                    flush=True,
                )
    return rates


def rate_table(rates: dict[int, Rates]) -> str:
    sides = sorted(
        next(iter(rates.values())),
        key=lambda side: (side in ("ceiling", "no logprobs"), side.startswith("vllm"), side),
    )
    rows = [
        [f"{count}", *(f"{median_of(by_side[side], what):,.0f}" for side in sides)]
        for what in ("wall", "cpu")
        for count, by_side in rates.items()
    ]
    labels = [f"{count} {unit}" for unit in ("tok/s", "tok/CPU-s") for count in rates]
    return table(["sequences", *sides], [[label, *row[1:]] for label, row in zip(labels, rows, strict=True)])


def median_of(rates: list[Rate], what: str) -> float:
    return statistics.median(getattr(rate, what) for rate in rates)


def ratios(by_side: Rates, side: str, what: str) -> list[float]:
    """Of each repeat, to the ceiling's rate in the same repeat."""
    return [
        getattr(ours, what) / getattr(best, what)
        for ours, best in zip(by_side[side], by_side["ceiling"], strict=True)
    ]


def ratio_table(rates: dict[int, Rates]) -> str:
    rows = []
    for count, by_side in rates.items():
        for side in (side for side in by_side if side.startswith("vllm/")):
            found = {what: ratios(by_side, side, what) for what in ("wall", "cpu")}
            cells = [
                f"{statistics.median(each):.1%} ({min(each):.0%} - {max(each):.0%})"
                for each in found.values()
            ]
            rows.append([f"{count}", side, *cells])
    return table(
        ["sequences", "side", "of the ceiling (least - most)", "by CPU-seconds"],
        sorted(rows, key=lambda row: (int(row[0]), row[1])),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", choices=["builtin", "random"], default=["builtin", "random"])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--parameters", type=int, default=80_000_000)
    parser.add_argument("--stream-interval", type=int, nargs="+", default=[1, 8])
    parser.add_argument(
        "--no-vllm", dest="vllm", action="store_false", help="measure the embedded engine only"
    )
    parser.add_argument("--json", action="store_true", help="print all repeats as JSON instead of tables")
    options = parser.parse_args()
    if options.vllm:
        need_vllm(parser, "give --no-vllm")
    found: dict[str, Any] = {"conditions": conditions()}
    for kind in options.model:
        with tempfile.TemporaryDirectory() as directory:
            made = Path(directory)
            if kind == "random":
                model = make_random_model(made, options.parameters, vocab_size=RANDOM_VOCABULARY)
            else:
                model = make_builtin_model(made)
            rates = asyncio.run(measure(model, options))
        found[kind] = {
            "parameters": model.parameters,
            "rates": {
                n: {side: [asdict(r) for r in found] for side, found in by.items()} for n, by in rates.items()
            },
        }
        if not options.json:
            size = f"{model.parameters / 1e6:.1f} million parameters, vocabulary of {model.vocab_size:,}"
            print(
                f"\n{kind}: {size}; {options.tokens} tokens each, {options.repeat} "
                f"repeats\n{rate_table(rates)}"
            )
            if options.vllm:
                print(f"\n{ratio_table(rates)}", flush=True)
    print(json.dumps(found) if options.json else f"\n{found['conditions']}")


if __name__ == "__main__":
    main()
