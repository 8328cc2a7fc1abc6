"""Real vLLM that truncates: what it kept, and logprobs among these, against a plain forward pass."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from asyncrl_cli.contracts.environment import EpisodeFailed
from asyncrl_cli.data.sample_fields import KEPT_TOKENS
from asyncrl_cli.engines.port import Completion
from asyncrl_cli.engines.vllm.requests import VllmTrack
from tests.engines.made import prompts, sampling
from tests.engines.needs import runs_vllm
from tests.engines.vllm.vllm_world import World, world

pytestmark = runs_vllm
TEMPERATURE = 0.8
HOW = dict(temperature=TEMPERATURE, top_p=0.95, top_k=20, returns_kept=True)


@pytest.fixture(scope="module")
def there(model: Qwen3ForCausalLM, model_dir: Path) -> Iterator[World]:
    with world(model, model_dir, top_p=0.95, top_k=20) as running:
        yield running


def plain_probabilities(there: World, version: int, tokens: list[int]) -> torch.Tensor:
    """After each token, of all next ones."""
    other = Qwen3ForCausalLM(there.model.config).eval()
    other.load_state_dict(there.weights[version])
    with torch.no_grad():
        logits = other(input_ids=torch.tensor([tokens])).logits[0]
    return torch.softmax(logits / TEMPERATURE, dim=-1)


def kept_by(probabilities: torch.Tensor, top_k: int = 20, top_p: float = 0.95) -> set[int]:
    """The most likely ones, until they have top_p of what top_k leaves."""
    values, ids = probabilities.sort(descending=True)
    values = values[:top_k] / values[:top_k].sum()
    before = values.cumsum(0) - values
    return set(ids[:top_k][before < top_p].tolist())


def is_kept_by(ids: list[int], row: torch.Tensor) -> bool:
    """Also if rounding decides about the last token."""
    return kept_by(row, top_p=0.9499) <= set(ids) <= kept_by(row, top_p=0.9501)


def check(there: World, prompt: list[int], completion: Completion, version: int) -> None:
    probabilities = plain_probabilities(there, version, prompt + completion.tokens)[len(prompt) - 1 :]
    kept = completion.fields[KEPT_TOKENS]
    assert len(kept) == len(completion.tokens) == len(completion.logprobs) == len(completion.versions)
    for row, token, ids, logprob in zip(
        probabilities[:-1], completion.tokens, kept, completion.logprobs, strict=True
    ):
        assert is_kept_by(ids, row)
        assert logprob == pytest.approx((row[token] / row[ids].sum()).log().item(), abs=1e-4)


async def test_kept_tokens_and_logprobs_are_of_the_scaled_truncated_distribution(there: World) -> None:
    requests, version = prompts(12), there.engine.version
    for prompt, completion in zip(requests, await there.all_of(requests, sampling(**HOW)), strict=True):
        check(there, prompt, completion, version)


def test_an_output_that_waited_and_was_appended_to_has_every_sampled_token_among_the_kept() -> None:
    """vLLM lists a sampled token only once in what it appends."""
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput, RequestOutput

    def output(sampled: int, likely: list[int]) -> RequestOutput:
        listed = FlatLogprobs()
        logprobs = [-1.0, *[-1.0] * 3, *[-math.inf] * 3]
        listed.append_fast([sampled, *likely], logprobs, itertools.count(), itertools.repeat(None))
        part = CompletionOutput(0, "", [sampled], None, listed)
        return RequestOutput("r", None, [1], None, [part], finished=False)

    how = sampling(**{**HOW, "top_k": 3})
    track = VllmTrack(request_id="r", prompt_tokens=[1], sampling=how, seed=0, vocab_size=64)
    waiting = output(5, [4, 5, 6, 7, 8, 9])
    for sampled, likely in ((20, [20, 21, 22, 1, 2, 3]), (31, [30, 31, 32, 1, 2, 3])):
        waiting.add(output(sampled, likely), aggregate=True)
    track.add(waiting.outputs[0])
    assert track.tokens == [5, 20, 31]
    assert [{*kept} for kept in track.fields[KEPT_TOKENS]] == [{4, 5, 6}, {20, 21, 22}, {30, 31, 32}]


def test_more_tokens_of_equal_probability_than_vllm_lists_are_a_failure_wherever_the_sampled_one_is() -> None:
    from vllm.logprobs import FlatLogprobs
    from vllm.outputs import CompletionOutput

    how = sampling(**{**HOW, "top_k": 3})
    for sampled in (4, 20):  # listed, and not
        listed = FlatLogprobs()
        tokens = [sampled, 4, 5, 6, 7, 8, 9]
        listed.append_fast(tokens, [-1.0] * 7, itertools.count(), itertools.repeat(None))
        track = VllmTrack(request_id="r", prompt_tokens=[1], sampling=how, seed=0, vocab_size=64)
        with pytest.raises(EpisodeFailed, match="of equal probability"):
            track.add(CompletionOutput(0, "", [sampled], None, listed))


async def test_an_eval_beside_them_has_no_masks(there: World) -> None:
    prompt = prompts(1)[0]
    greedy, masked = await asyncio.gather(
        there.generate(prompt, sampling(temperature=0.0, top_p=0.95, top_k=20)),
        there.generate(prompt, sampling(**HOW)),
    )
    assert greedy.fields == {}
    assert greedy.logprobs == pytest.approx(there.plain(there.engine.version, prompt, greedy), abs=1e-4)
    check(there, prompt, masked, there.engine.version)


async def test_masks_stay_with_their_tokens_through_a_load(there: World) -> None:
    requests, first = prompts(8), there.engine.version
    generating = asyncio.create_task(there.all_of(requests, sampling(100, **HOW)))
    await there.sampled(100)
    await there.load(second := there.newer(), "recompute-kv")
    crossed = 0
    for prompt, whole in zip(requests, await generating, strict=True):
        crossed += {first, second} <= set(whole.versions)
        for version in (first, second):
            probabilities = plain_probabilities(there, version, prompt + whole.tokens)[len(prompt) - 1 :]
            pairs = zip(probabilities, whole.fields[KEPT_TOKENS], whole.versions, strict=False)
            for row, ids, sampled_by in pairs:
                if sampled_by == version:
                    assert is_kept_by(ids, row)
    assert crossed


async def test_more_equally_likely_tokens_than_vllm_lists_fail_the_trajectory(there: World) -> None:
    """With a head of zeros all 64 tokens are as likely as the twentieth."""
    version = there.newer()
    head = there.weights[version]["lm_head.weight"]
    there.weights[version]["lm_head.weight"] = torch.zeros_like(head)
    await there.load(version, "drain")
    with pytest.raises(EpisodeFailed, match="kept 40 tokens or more, of equal probability"):
        await there.generate(prompts(1)[0], sampling(**{**HOW, "top_p": 1.0}))
