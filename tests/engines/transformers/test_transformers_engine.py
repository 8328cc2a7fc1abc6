"""The engine against plain forward passes of transformers, with real weight loads in flight."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM
from transformers.generation.continuous_batching import PagedAttentionCache

from asyncrl_cli.base.errors import ExecutorFailed
from asyncrl_cli.engines.port import Completion, Sampling
from asyncrl_cli.engines.transformers import batched_model
from asyncrl_cli.engines.transformers.prefix_scheduler import PrefixScheduler
from asyncrl_cli.engines.transformers.transformers_engine import TransformersEngine
from asyncrl_cli.weights.buckets import Bucket
from tests.engines import prefixes, tiny
from tests.engines.brake import DEADLINE_S, Brake
from tests.engines.made import made_for, prompts, sampling, transformers_engine
from tests.engines.vllm.vllm_world import World
from tests.packed import pack
from tests.products import counted_products

pytestmark = pytest.mark.slow


async def all_of(
    engine: TransformersEngine, requests: list[list[int]], how: Sampling, first_seed: int = 0
) -> list[Completion]:
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(engine.generate(f"r{first_seed + i}", prompt, how, first_seed + i))
            for i, prompt in enumerate(requests)
        ]
    return [task.result() for task in running]


@asynccontextmanager
async def begun_together(engine: TransformersEngine, requests: int) -> AsyncIterator[None]:
    """The generation thread waits until so many requests have come in."""
    with engine.manager.pause():
        yield
        async with asyncio.timeout(DEADLINE_S):
            while len(engine.sampler.tracks) < requests:  # noqa: ASYNC110  (each comes in a turn of its own task)
                await asyncio.sleep(0)


async def test_every_matrix_product_of_generating_and_scoring_is_in_float32(
    model_dir: Path, tmp_path: Path
) -> None:
    async with transformers_engine(model_dir) as engine:
        with counted_products(tmp_path) as products:
            await all_of(engine, prompts(4), sampling(8))
            await engine.score(prompts(2), 1.0)
        assert {dtype for _, dtype in products} == {"float"}
        assert sum(products.values()) > 8 * 21  # eight passes through 21 matrices


@pytest.mark.parametrize(("temperature", "top_p", "top_k"), [(1.3, 0.8, 0), (0.7, 1.0, 5), (0.9, 0.7, 4)])
async def test_logprobs_are_of_the_scaled_untruncated_distribution(
    model: Qwen3ForCausalLM, model_dir: Path, temperature: float, top_p: float, top_k: int
) -> None:
    async with transformers_engine(model_dir) as engine:
        requests = prompts(12)
        how = sampling(temperature=temperature, top_p=top_p, top_k=top_k)
        for prompt, completion in zip(requests, await all_of(engine, requests, how), strict=True):
            expected = tiny.plain_logprobs(model, model.state_dict(), prompt + completion.tokens, temperature)
            assert completion.logprobs == pytest.approx(expected[len(prompt) - 1 :], abs=1e-5)
            assert completion.versions == [0] * len(completion.tokens)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("batched_model.PREFILL_TOKENS_PACKED", 16),
        ("batched_model.CACHE_SHARE_OF_MEMORY", 0.0),
        ("batched_model.PLAIN_MODEL_TYPES", frozenset()),
    ],
    ids=["prompts are prefilled in pieces", "a small cache evicts sequences", "attention is sdpa"],
)
async def test_logprobs_are_the_same_when(
    model: Qwen3ForCausalLM, model_dir: Path, monkeypatch: pytest.MonkeyPatch, setting: str, value: object
) -> None:
    monkeypatch.setattr(f"asyncrl_cli.engines.transformers.{setting}", value)

    async with transformers_engine(model_dir, slots=16) as engine:
        requests = [prompt for prompt in prompts(6) for _ in range(4)][:16]
        completions = await all_of(engine, requests, sampling(100, temperature=0.5))
        for prompt, completion in zip(requests, completions, strict=True):
            expected = tiny.plain_logprobs(model, model.state_dict(), prompt + completion.tokens, 0.5)
            assert completion.logprobs == pytest.approx(expected[len(prompt) - 1 :], abs=1e-5)
            # an end of sequence token ends the response and stays in it
            assert completion.finish_reason == ("stop" if completion.tokens[-1] == tiny.EOS else "length")
            assert tiny.EOS not in completion.tokens[:-1]
        assert {completion.finish_reason for completion in completions} == {"stop", "length"}


async def test_the_prompts_of_a_group_are_prefilled_together(
    model: Qwen3ForCausalLM, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of four, some of one token, that begin while others decode: the attention of many in one call is
    each one's own."""
    counts: list[int] = []
    attend = batched_model.attend

    def counted(*packed: torch.Tensor, block: Any, scaling: float | None) -> torch.Tensor:
        if block.mask_B1PL is None:
            counts.append(len(block.queries_BP))
        return attend(*packed, block, scaling)

    monkeypatch.setattr(
        batched_model, "attend", lambda *given: counted(*given[:3], block=given[3], scaling=given[4])
    )

    async with transformers_engine(model_dir, slots=16) as engine:
        requests = [prompt for prompt in [[7], *prompts(6), [9], [8]] for _ in range(4)]
        async with begun_together(engine, 16):
            generating = asyncio.create_task(all_of(engine, requests, sampling(30)))
        completions = await generating
        for prompt, completion in zip(requests, completions, strict=True):
            expected = tiny.plain_logprobs(model, model.state_dict(), prompt + completion.tokens)
            assert completion.logprobs == pytest.approx(expected[len(prompt) - 1 :], abs=1e-5)
    assert max(counts) >= 4


async def test_requests_with_different_sampling_share_a_batch(
    model: Qwen3ForCausalLM, model_dir: Path
) -> None:
    async with transformers_engine(model_dir) as engine:
        prompt = prompts(1)[0]
        greedy, hot = await asyncio.gather(
            engine.generate("eval", prompt, sampling(temperature=0.0), 1),
            engine.generate("train", prompt, sampling(temperature=1.5), 1),
        )
        expected = tiny.plain_logprobs(model, model.state_dict(), prompt + hot.tokens, 1.5)
        assert hot.logprobs == pytest.approx(expected[len(prompt) - 1 :], abs=1e-5)
        assert greedy.tokens != hot.tokens


async def test_greedy_equals_the_argmax_of_plain_forwards(model: Qwen3ForCausalLM, model_dir: Path) -> None:
    async with transformers_engine(model_dir) as engine:
        requests = prompts(4)
        first = await all_of(engine, requests, sampling(16, temperature=0.0))
        again = await all_of(engine, requests, sampling(16, temperature=0.0), first_seed=50)
        assert [c.tokens for c in first] == [c.tokens for c in again]
        for prompt, completion in zip(requests, first, strict=True):
            for count, token in enumerate(completion.tokens):
                context = prompt + completion.tokens[:count]
                scores = [
                    tiny.plain_logprobs(model, model.state_dict(), [*context, t])[-1] for t in (token, 5, 17)
                ]
                assert scores[0] >= max(scores) - 1e-5


async def test_a_seed_fixes_the_response_whoever_else_is_in_the_batch(model_dir: Path) -> None:
    async with transformers_engine(model_dir) as engine:
        requests = prompts(8)
        alone = await engine.generate("alone", requests[0], sampling(), 0)
        together = await all_of(engine, requests, sampling())
        other = await engine.generate("other", requests[0], sampling(), 99)
        assert alone.tokens == together[0].tokens
        assert alone.tokens != other.tokens


async def test_a_response_ends_at_its_stop_string_or_its_length(model_dir: Path) -> None:
    async with transformers_engine(model_dir) as engine:
        prompt = prompts(1)[0]
        free = await engine.generate("free", prompt, sampling(40), 4)
        text = [tiny.VOCABULARY_INVERSE[token] for token in free.tokens]
        stop = "".join(text[10:12])
        end = next(i for i in range(1, len(text)) if "".join(text[i - 1 : i + 1]) == stop)
        stopped = await engine.generate("stopped", prompt, sampling(40, stop=("zzz", stop)), 4)
        assert stopped.tokens == free.tokens[: end + 1]
        assert stopped.finish_reason == "stop"
        short = await engine.generate("short", prompt, sampling(7), 4)
        assert (short.tokens, short.finish_reason) == (free.tokens[:7], "length")
        assert engine.running == 0


async def test_all_slots_run_in_every_forward(model_dir: Path) -> None:
    async with transformers_engine(model_dir, slots=32) as engine:
        how = sampling(100, temperature=0.2)
        async with begun_together(engine, 32):
            generating = asyncio.create_task(all_of(engine, [[2 + i, 3, 4, 5] * 8 for i in range(32)], how))
        completions = await generating
        forwards = engine.manager.current_batch
        longest = max(len(completion.tokens) for completion in completions)
        assert forwards < 1.5 * longest  # with half of the slots it would be twice


async def test_more_requests_than_slots_wait_for_their_turn(model_dir: Path) -> None:
    seen: list[int] = []
    engine = TransformersEngine(
        *made_for(model_dir, slots=3, max_prompt_tokens=64, max_response_tokens=32), seen.append
    )
    await engine.start()
    completions = await all_of(engine, prompts(10), sampling(12))
    await engine.close()
    assert max(seen) == 3
    assert seen[-1] == 0
    assert engine.sampled_tokens == sum(len(completion.tokens) for completion in completions)


async def _in_flight_load(
    model: Qwen3ForCausalLM, model_dir: Path, interrupt: str
) -> tuple[list[list[int]], list[Completion], dict[int, dict[str, object]]]:
    """24 requests on 8 slots; versions 5 and 6 are loaded after some tokens."""
    weights = {0: model.state_dict(), 5: tiny.weights_after(model, 1), 6: tiny.weights_after(model, 2)}
    async with transformers_engine(model_dir) as engine:
        requests, brake = prompts(24), Brake(engine, {0: 60, 5: 160})
        generating = asyncio.create_task(all_of(engine, requests, sampling(100, temperature=0.8)))
        for version in (5, 6):
            async with brake.stopped(until=interrupt):
                report = await engine.load(weights[version], version, interrupt)  # type: ignore[arg-type]
            assert 0 < report.load_s <= report.pause_s
            assert engine.version == version
        completions = await generating
        assert engine.sampled_tokens == sum(len(completion.tokens) for completion in completions)
        return requests, completions, weights  # type: ignore[return-value]


def _check_spans(
    model: Qwen3ForCausalLM,
    prompt: list[int],
    completion: Completion,
    weights: dict[int, dict[str, object]],
    versions: set[int],
    tolerance: float,
) -> None:
    tokens = prompt + completion.tokens
    for version in versions & set(completion.versions):
        expected = tiny.plain_logprobs(model, weights[version], tokens, 0.8)[len(prompt) - 1 :]  # type: ignore[arg-type]
        span = [i for i, v in enumerate(completion.versions) if v == version]
        assert [completion.logprobs[i] for i in span] == pytest.approx(
            [expected[i] for i in span], abs=tolerance
        )


async def test_recompute_kv_makes_each_span_the_new_weights_own(
    model: Qwen3ForCausalLM, model_dir: Path
) -> None:
    requests, completions, weights = await _in_flight_load(model, model_dir, "recompute-kv")
    spans = [len(set(completion.versions)) for completion in completions]
    assert max(spans) == 3
    for prompt, completion in zip(requests, completions, strict=True):
        assert completion.versions == sorted(completion.versions)
        assert len(completion.tokens) == len(completion.logprobs) == len(completion.versions) <= 100
        assert completion.finish_reason == ("stop" if completion.tokens[-1] == tiny.EOS else "length")
        _check_spans(model, prompt, completion, weights, {0, 5, 6}, 1e-4)


async def test_keep_kv_marks_the_spans_and_goes_on_with_the_old_cache(
    model: Qwen3ForCausalLM, model_dir: Path
) -> None:
    requests, completions, weights = await _in_flight_load(model, model_dir, "keep-kv")
    mixed = [c for c in completions if len(set(c.versions)) > 1]
    assert mixed
    for prompt, completion in zip(requests, completions, strict=True):
        assert completion.versions == sorted(completion.versions)
        _check_spans(model, prompt, completion, weights, {completion.versions[0]}, 1e-4)
    # the first token after the load attends to old keys: it is neither the old nor the new model's
    prompt, completion = next((p, c) for p, c in zip(requests, completions, strict=True) if c is mixed[0])
    border = next(i for i, version in enumerate(completion.versions) if version != completion.versions[0])
    for version in (completion.versions[0], completion.versions[border]):
        plain = tiny.plain_logprobs(model, weights[version], prompt + completion.tokens, 0.8)  # type: ignore[arg-type]
        assert abs(completion.logprobs[border] - plain[len(prompt) - 1 + border]) > 1e-4


@asynccontextmanager
async def engine_with_hits(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[TransformersEngine, list[int]]]:
    """An engine, and how many tokens of each prompt it has found in its cache."""
    found: list[int] = []
    search = PagedAttentionCache.search_prefix_match

    def noted(cache: PagedAttentionCache, request_id: str, tokens: list[int]) -> int:
        found.append(search(cache, request_id, tokens))
        return found[-1]

    monkeypatch.setattr(PagedAttentionCache, "search_prefix_match", noted)
    async with transformers_engine(model_dir) as engine:
        found.clear()
        yield engine, found


@pytest.mark.parametrize("interrupt", ["keep-kv", "recompute-kv", "drain"])
async def test_a_later_turn_finds_the_blocks_of_its_earlier_ones_until_a_load(
    model: Qwen3ForCausalLM, model_dir: Path, monkeypatch: pytest.MonkeyPatch, interrupt: Any
) -> None:
    weights = {0: model.state_dict(), 5: tiny.weights_after(model, 1)}
    question = [3 + i % 50 for i in range(60)]
    async with engine_with_hits(model_dir, monkeypatch) as (engine, found):
        answer = await engine.generate("e", question, sampling(40), seed=1)
        second = [*(question + answer.tokens)[:99], 5, 6, 7]
        before = await engine.generate("e", second, sampling(8), seed=2, first_version=0)
        await engine.load(weights[5], 5, interrupt)
        after = [await engine.generate("e", second, sampling(8), seed=3, first_version=0) for _ in range(2)]
    blocks = (len(second) - 1) // 32 * 32
    assert found == [0, blocks, 0, blocks]
    for version, completion in ((0, before), (5, after[0]), (5, after[1])):
        plain = tiny.plain_logprobs(model, weights[version], second + completion.tokens)
        assert completion.logprobs == pytest.approx(plain[len(second) - 1 :], abs=1e-4)
        assert set(completion.versions) == {version}


@asynccontextmanager
async def prefixes_world(model: Qwen3ForCausalLM, model_dir: Path) -> AsyncIterator[World]:
    async with transformers_engine(model_dir) as engine:
        yield World(model, engine, asyncio.Runner(), Path())


@asynccontextmanager
async def held(there: World, interrupt: Any) -> AsyncIterator[None]:
    """As `prefixes.some_tokens`, however slow the event loop is."""
    engine: Any = there.engine
    brake = Brake(engine, {engine.version: engine.sampled_tokens + 8})
    async with brake.stopped(until=interrupt):
        yield


async def test_a_group_computes_its_prompt_once(model: Qwen3ForCausalLM, model_dir: Path) -> None:
    async with prefixes_world(model, model_dir) as there:
        await prefixes.check_prompt_is_computed_once(there, rest=1, begun=held)


@pytest.mark.parametrize("interrupt", ["keep-kv", "recompute-kv", "drain"])
async def test_after_a_load_nobody_uses_what_older_weights_have_computed(
    model: Qwen3ForCausalLM, model_dir: Path, interrupt: Any
) -> None:
    async with prefixes_world(model, model_dir) as there:
        await prefixes.check_nothing_older_is_used(there, interrupt, begun=held)


async def test_a_group_goes_on_without_the_response_that_computed_its_prompt(
    model: Qwen3ForCausalLM, model_dir: Path
) -> None:
    async with transformers_engine(model_dir) as engine:
        brake = Brake(engine, {0: 0})
        async with begun_together(engine, 4):
            generating = asyncio.create_task(all_of(engine, [prefixes.PROMPT] * 4, sampling(20)))
        async with brake.stopped():
            assert len(engine.manager.batch_processor.scheduler.waiting_requests) == 3
            await engine.abort("r0")
        first, *others = await generating
        assert first.finish_reason == "abort"
        for completion in others:
            plain = tiny.plain_logprobs(model, model.state_dict(), prefixes.PROMPT + completion.tokens)
            assert completion.logprobs == pytest.approx(plain[len(prefixes.PROMPT) - 1 :], abs=1e-5)


async def test_a_prompt_shared_across_a_load_would_be_noticed(
    model: Qwen3ForCausalLM, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody = property(lambda scheduler: frozenset(), lambda scheduler, ids: None)
    monkeypatch.setattr(PrefixScheduler, "interrupted", nobody, raising=False)
    async with prefixes_world(model, model_dir) as there:
        with pytest.raises(AssertionError):
            await prefixes.check_nothing_older_is_used(there, "keep-kv", begun=held)


async def test_nobody_shares_the_blocks_of_a_response_that_keep_kv_interrupted(
    model: Qwen3ForCausalLM, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first block is half of old weights: a prompt that begins with the same tokens must not find it."""

    weights, question = tiny.weights_after(model, 1), [3 + i % 50 for i in range(20)]
    async with engine_with_hits(model_dir, monkeypatch) as (engine, found):
        brake = Brake(engine, {0: 5})
        running = asyncio.create_task(engine.generate("e", question, sampling(100), seed=1))
        async with brake.stopped(until="keep-kv"):
            await engine.load(weights, 5, "keep-kv")
        mixed = await running
        assert len(set(mixed.versions)) == 2
        same = (question + mixed.tokens)[:60]
        completion = await engine.generate("f", same, sampling(8), seed=2)
    assert found == [0, 0]
    plain = tiny.plain_logprobs(model, weights, same + completion.tokens)
    assert completion.logprobs == pytest.approx(plain[len(same) - 1 :], abs=1e-4)


@pytest.mark.parametrize("interrupt", ["keep-kv", "recompute-kv"])
async def test_a_prompt_that_a_load_finds_half_computed_is_computed_again(
    model: Qwen3ForCausalLM, model_dir: Path, monkeypatch: pytest.MonkeyPatch, interrupt: Any
) -> None:
    monkeypatch.setattr(batched_model, "PREFILL_TOKENS_PACKED", 1)  # 66 in a pass: one prompt and a half
    weights, questions = tiny.weights_after(model, 1), [[3 + (i * k) % 50 for i in range(44)] for k in (1, 3)]
    async with transformers_engine(model_dir, slots=2) as engine:
        brake = Brake(engine, {0: 0})
        async with begun_together(engine, 2):
            generating = asyncio.create_task(all_of(engine, questions, sampling(20)))
        async with brake.stopped(until=interrupt):
            requests = engine.manager.batch_processor.scheduler.active_requests.values()
            assert [0 < len(one.remaining_prefill_tokens) < 44 for one in requests] == [False, True]
            await engine.load(weights, 5, interrupt)
        first, second = await generating
    assert first.versions[0] == 0
    assert set(second.versions) == {5}
    plain = tiny.plain_logprobs(model, weights, questions[1] + second.tokens)
    assert second.logprobs == pytest.approx(plain[len(questions[1]) - 1 :], abs=1e-5)


async def test_drain_lets_running_responses_end_on_their_version(
    model: Qwen3ForCausalLM, model_dir: Path
) -> None:
    requests, completions, weights = await _in_flight_load(model, model_dir, "drain")
    assert all(len(set(completion.versions)) == 1 for completion in completions)
    assert {completion.versions[0] for completion in completions} == {0, 5, 6}
    for prompt, completion in zip(requests, completions, strict=True):
        _check_spans(model, prompt, completion, weights, {0, 5, 6}, 1e-5)


@pytest.mark.parametrize("interrupt", ["drain", "keep-kv", "recompute-kv"])
async def test_a_failed_load_leaves_the_old_version_serving(
    model: Qwen3ForCausalLM, model_dir: Path, interrupt: str
) -> None:
    async with transformers_engine(model_dir) as engine:
        bad = tiny.weights_after(model, 1)
        bad["model.norm.weight"] = bad["model.norm.weight"][:-1]
        del bad["lm_head.weight"]
        bad["surprise"] = bad["model.norm.weight"]
        brake = Brake(engine, {0: 20})
        generating = asyncio.create_task(all_of(engine, prompts(4), sampling()))
        async with brake.stopped():
            with pytest.raises(
                ValueError, match=r"missing lm_head.weight; unknown surprise; wrong shape model.norm"
            ):
                await engine.load(bad, 9, interrupt)  # type: ignore[arg-type]
        for prompt, completion in zip(prompts(4), await generating, strict=True):
            assert set(completion.versions) == {0}
            expected = tiny.plain_logprobs(model, model.state_dict(), prompt + completion.tokens)
            assert completion.logprobs == pytest.approx(expected[len(prompt) - 1 :], abs=1e-5)
        assert engine.version == 0


def half_way(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Fits, but has no data behind its second tensor."""
    second = list(weights)[1]
    return {**weights, second: torch.empty_like(weights[second], device="meta")}


async def test_aborts_that_come_while_recompute_kv_interrupts_harm_nobody(
    model: Qwen3ForCausalLM, model_dir: Path
) -> None:
    """The load's thread has interrupted the first response when the event loop is asked to abort the
    others."""

    async with transformers_engine(model_dir, slots=4) as engine:
        loop, gone, asked = asyncio.get_running_loop(), threading.Event(), list[Any]()
        brake = Brake(engine, {0: 20})
        generating = [
            asyncio.create_task(engine.generate(f"r{i}", [5, 6, 7], sampling(128, temperature=0.1), i))
            for i in range(4)
        ]
        scheduler = engine.manager.batch_processor.scheduler
        requeue = scheduler.add_waiting_request

        async def abort_others() -> None:
            for i in range(1, 4):
                await engine.abort(f"r{i}")
            await asyncio.gather(*generating[1:])
            gone.set()

        def requeue_slowly(request: Any) -> None:
            requeue(request)
            if not asked:
                asked.append(asyncio.run_coroutine_threadsafe(abort_others(), loop))
                assert gone.wait(DEADLINE_S)

        async with brake.stopped(until="recompute-kv"):
            scheduler.add_waiting_request = requeue_slowly
            await engine.load(tiny.weights_after(model, 1), 5, "recompute-kv")
        kept, *aborted = await asyncio.gather(*generating)
        assert len(asked) == 1
        assert [completion.finish_reason for completion in aborted] == ["abort"] * 3
        assert set(kept.versions) == {0, 5}
        assert (await engine.generate("next", [5, 6, 7], sampling(4), 0)).tokens
        assert (engine.running, engine.sampler.tracks) == (0, {})


@pytest.mark.parametrize("interrupt", ["drain", "keep-kv", "recompute-kv"])
async def test_a_load_that_fails_half_way_ends_the_engine(
    model: Qwen3ForCausalLM, model_dir: Path, interrupt: str
) -> None:
    async with transformers_engine(model_dir, slots=2) as engine:
        endless, brake = sampling(128, temperature=0.1), Brake(engine, {0: 20})
        async with asyncio.timeout(DEADLINE_S):
            generating = [
                asyncio.create_task(engine.generate(f"r{i}", [5, 6, 7], endless, i)) for i in range(4)
            ]
            async with brake.stopped(until=interrupt):
                with pytest.raises(
                    ExecutorFailed, match=r"loading version 9 failed half-way: NotImplementedError: .*meta"
                ):
                    await engine.load(half_way(tiny.weights_after(model, 1)), 9, interrupt)  # type: ignore[arg-type]
            ended = await asyncio.gather(*generating, return_exceptions=True)
        finished, failed = (ended[:2], ended[2:]) if interrupt == "drain" else ([], ended)
        assert [type(end) for end in failed] == [ExecutorFailed] * len(failed)
        # before the copy
        assert all(isinstance(end, Completion) and set(end.versions) == {0} for end in finished)
        sampled = engine.sampled_tokens
        with pytest.raises(ExecutorFailed, match="half-way"):
            await engine.generate("late", [5], endless, 0)
        with pytest.raises(ExecutorFailed, match="half-way"):
            await engine.load(tiny.weights_after(model, 1), 10, "keep-kv")
        with pytest.raises(ExecutorFailed, match="half-way"):
            await engine.score([[5, 6, 7]], 1.0)
        assert (engine.version, engine.running, engine.sampled_tokens) == (0, 0, sampled)


async def test_without_a_second_buffer_too_only_a_started_copy_ends_the_engine(
    model: Qwen3ForCausalLM, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buckets = pack(tiny.weights_after(model, 1), 300_000)

    def lost() -> list[Bucket]:
        raise OSError("the bucket is lost")

    async with transformers_engine(model_dir) as engine:
        with pytest.raises(OSError, match="the bucket is lost"):
            await engine.load_in_place(lost, 9, "keep-kv")
        with pytest.raises(ValueError, match="do not fit"):
            await engine.load_in_place(lambda: buckets[:1], 9, "keep-kv")
        completion = await engine.generate("on", [5, 6, 7], sampling(4), 0)
        assert set(completion.versions) == {0}
        name, own = "model.norm.weight", engine.model.state_dict
        monkeypatch.setattr(engine.model, "state_dict", lambda: {k: v for k, v in own().items() if k != name})
        with pytest.raises(
            ExecutorFailed, match=r"loading version 9 failed half-way: KeyError: 'model\.norm\.weight'"
        ):
            await engine.load_in_place(lambda: buckets, 9, "keep-kv")
        with pytest.raises(ExecutorFailed, match="half-way"):
            await engine.generate("late", [5, 6, 7], sampling(4), 0)


async def test_abort_returns_what_there_is_and_frees_the_slot(model_dir: Path) -> None:
    async with transformers_engine(model_dir, slots=1) as engine:
        brake = Brake(engine, {0: 6})
        first = asyncio.create_task(engine.generate("first", [5, 6, 7], sampling(128, temperature=0.1), 0))
        queued = asyncio.create_task(engine.generate("queued", [5, 6, 7], sampling(), 0))
        async with brake.stopped():
            await engine.abort("queued")
            await engine.abort("unknown")
            assert await queued == Completion(tokens=[], logprobs=[], versions=[], finish_reason="abort")
            await engine.abort("first")
            aborted = await first
        assert aborted.finish_reason == "abort"
        assert len(aborted.tokens) == len(aborted.logprobs) == len(aborted.versions) == 6
        assert (await engine.generate("next", [5, 6, 7], sampling(4), 0)).tokens
        assert engine.running == 0


async def test_a_cancelled_generate_gives_its_slot_back(model_dir: Path) -> None:
    async with transformers_engine(model_dir, slots=1) as engine:
        brake = Brake(engine, {0: 6})
        running = asyncio.create_task(
            engine.generate("running", [5, 6, 7], sampling(128, temperature=0.1), 0)
        )
        waiting = asyncio.create_task(engine.generate("waiting", [5, 6, 7], sampling(), 0))
        async with brake.stopped():
            for task in (waiting, running):
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
        assert engine.running == 0
        assert (await engine.generate("next", [5, 6, 7], sampling(4), 0)).tokens


async def test_score_equals_plain_forwards_of_the_loaded_weights(
    model: Qwen3ForCausalLM, model_dir: Path
) -> None:
    async with transformers_engine(model_dir) as engine:
        generating = asyncio.create_task(all_of(engine, prompts(4), sampling()))
        sequences = prompts(6)
        weights = tiny.weights_after(model, 3)
        await engine.load(weights, 3, "keep-kv")
        scores = await engine.score(sequences, 0.7)
        for sequence, logprobs in zip(sequences, scores.logprobs, strict=True):
            assert logprobs == pytest.approx(tiny.plain_logprobs(model, weights, sequence, 0.7), abs=1e-5)
        assert scores.pause_s > 0
        await generating


async def test_closing_fails_what_still_runs_or_waits(model_dir: Path) -> None:
    async with transformers_engine(model_dir, slots=1) as engine:
        brake = Brake(engine, {0: 6})
        running = asyncio.create_task(
            engine.generate("running", [5, 6, 7], sampling(128, temperature=0.1), 0)
        )
        waiting = asyncio.create_task(engine.generate("waiting", [5, 6, 7], sampling(), 0))
        async with brake.stopped():
            closing = asyncio.create_task(engine.close())
            results = await asyncio.gather(running, waiting, return_exceptions=True)
        await closing
        assert [type(result) for result in results] == [ExecutorFailed, ExecutorFailed]
        with pytest.raises(ExecutorFailed, match="closed"):
            await engine.generate("late", [5], sampling(), 0)


async def test_a_request_that_cannot_be_served_is_refused(model_dir: Path) -> None:
    async with transformers_engine(model_dir) as engine:
        with pytest.raises(ValueError, match="prompt of long has 65 tokens and asks for 128 more"):
            await engine.generate("long", [5] * 65, sampling(128), 0)
        with pytest.raises(ValueError, match="prompt of none has 0 tokens"):
            await engine.generate("none", [], sampling(), 0)
        with pytest.raises(ValueError, match="prompt of strange has the token 1000000"):
            await engine.generate("strange", [5, 10**6], sampling(), 0)
        assert (await engine.generate("next", [5], sampling(), 0)).tokens
