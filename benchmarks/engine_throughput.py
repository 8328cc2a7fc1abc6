"""Tokens per second of the embedded engine against a bare batched loop, side by side.

    python benchmarks/engine_throughput.py [--slots 8 64] [--tokens 100] [--repeat 3]

Prints the median over `--repeat` runs per number of sequences: wall-clock tokens/s, tokens per CPU-second (what counts on a
shared machine), and the ratio to the bare loop. The bare loop is a static batch with
a dynamic cache: no admission, no versions, no stop, so it is a ceiling and not a peer. The model is builtin:tiny's architecture
with random weights, on one compute thread; its end of sequence is a token that it does not have, so that every run makes the
same number of tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import DynamicCache

from asyncrl_cli.models.tiny import tiny_model, tiny_tokenizer
from asyncrl_cli.rollout.engine import Sampling
from asyncrl_cli.rollout.transformers_engine import TransformersEngine

CHARACTERS = "0123456789abcdef"
PROMPT_TOKENS = 30
NO_SUCH_TOKEN = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    wall_tokens_per_s: float
    cpu_tokens_per_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'sequences':>9}  {'engine tok/s':>12}  {'per CPU-s':>9}  {'bare per CPU-s':>14}  {'ratio':>5}")
    with tempfile.TemporaryDirectory() as directory:
        model, tokenizer = tiny_model(len(CHARACTERS) + 3, seed=0), tiny_tokenizer(CHARACTERS)
        model.generation_config.eos_token_id = NO_SUCH_TOKEN
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        for slots in options.slots:
            engine = [asyncio.run(run_engine(Path(directory), slots, options.tokens)) for _ in range(options.repeat)]
            bare = [run_bare(model, slots, options.tokens) for _ in range(options.repeat)]
            print_row(slots, engine, bare)


def print_row(slots: int, engine: list[Measured], bare: list[Measured]) -> None:
    def median(runs: list[Measured], name: str) -> float:
        return statistics.median(getattr(run, name) for run in runs)

    cpu, ceiling = median(engine, "cpu_tokens_per_s"), median(bare, "cpu_tokens_per_s")
    wall = median(engine, "wall_tokens_per_s")
    print(f"{slots:>9}  {wall:>12,.0f}  {cpu:>9,.0f}  {ceiling:>14,.0f}  {cpu / ceiling:>5.2f}", flush=True)


async def run_engine(directory: Path, slots: int, num_tokens: int) -> Measured:
    """All sequences at once, through the same port that a run uses."""
    engine = TransformersEngine(str(directory), slots=slots, max_prompt_tokens=PROMPT_TOKENS, max_response_tokens=num_tokens)
    await engine.start()
    prompts = torch.randint(3, len(CHARACTERS) + 3, (slots, PROMPT_TOKENS)).tolist()
    sampling = Sampling(temperature=1.0, max_response_tokens=num_tokens)
    await engine.generate("warm-up", prompts[0], Sampling(temperature=1.0, max_response_tokens=4), 0)
    before, began_s, began_cpu_s = engine.sampled_tokens, time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as tasks:
        for row, prompt in enumerate(prompts):
            tasks.create_task(engine.generate(f"sequence-{row}", prompt, sampling, row))
    wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    made = engine.sampled_tokens - before
    assert made == slots * num_tokens
    await engine.close()
    return Measured(wall_tokens_per_s=made / wall_s, cpu_tokens_per_s=made / cpu_s)


@torch.no_grad()
def run_bare(model: torch.nn.Module, slots: int, num_tokens: int) -> Measured:
    tokens = torch.randint(3, len(CHARACTERS) + 3, (slots, PROMPT_TOKENS))
    cache = DynamicCache(config=model.config)
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    for _ in range(num_tokens):
        logits = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        logprobs = logits.log_softmax(-1)
        tokens = torch.multinomial(logprobs.exp(), 1)
        logprobs.gather(1, tokens).tolist()
    wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    made = slots * num_tokens
    return Measured(wall_tokens_per_s=made / wall_s, cpu_tokens_per_s=made / cpu_s)


if __name__ == "__main__":
    main()
