"""Real vLLM against plain forward passes of transformers, with real weight loads in flight. One engine for
the whole module."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM

from asyncrl_cli.checkpoint.payloads import read_payloads, write_payloads
from asyncrl_cli.contracts.environment import OneTurn
from asyncrl_cli.contracts.prompt_group import PartKey
from asyncrl_cli.data.trajectories import joined_by_index
from asyncrl_cli.engines.port import Completion
from asyncrl_cli.engines.vllm import requests as vllm_requests
from asyncrl_cli.engines.vllm.worker_transports import paused
from asyncrl_cli.envs.chat import Chat
from asyncrl_cli.envs.episode import Limits, Means
from asyncrl_cli.envs.group_runner import GroupRunner
from asyncrl_cli.envs.slots import Slots
from asyncrl_cli.profile.schema import Interrupt
from tests.engines import prefixes, tiny
from tests.engines.made import prompts, sampling
from tests.engines.needs import runs_vllm
from tests.engines.vllm.vllm_kills import kill_and_expect
from tests.engines.vllm.vllm_world import MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS, World, world
from tests.envs.test_group_runner import KEY, TEMPLATE, Questions, Rewards, group

pytestmark = runs_vllm


PAGE_TOKENS = 32
"""Only whole pages are cached as prefixes; a CPU's default of 128 would hold none of these prompts."""
PAGES = 50
"""Enough for eight responses of 140 tokens with their prompts, too few for eight of 320."""


@pytest.fixture(scope="module")
def there(model: Qwen3ForCausalLM, model_dir: Path) -> Iterator[World]:
    config = model.config
    kv_bytes_per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    cache = {
        "block_size": PAGE_TOKENS,
        "kv_cache_memory_bytes": PAGES * PAGE_TOKENS * kv_bytes_per_token,
        # Room for one whole response in a pass, and not for all: where prefills were cut to fit, seeded
        # requests would end vLLM.
        "max_num_batched_tokens": MAX_PROMPT_TOKENS + MAX_RESPONSE_TOKENS,
    }
    with world(model, model_dir, engine_args=cache) as running:
        yield running


def well_formed(completion: Completion) -> None:
    assert len(completion.tokens) == len(completion.logprobs) == len(completion.versions)
    assert completion.versions == sorted(completion.versions)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.3])
async def test_logprobs_are_of_the_scaled_distribution(there: World, temperature: float) -> None:
    requests = prompts(12)
    version = there.engine.version
    for prompt, completion in zip(
        requests, await there.all_of(requests, sampling(temperature=temperature)), strict=True
    ):
        well_formed(completion)
        assert completion.logprobs == pytest.approx(
            there.plain(version, prompt, completion, temperature), abs=1e-4
        )
        assert completion.versions == [version] * len(completion.tokens)
        assert completion.finish_reason == ("stop" if completion.tokens[-1] == tiny.EOS else "length")


async def test_more_prompt_tokens_than_a_forward_pass_takes_are_no_trouble(there: World) -> None:
    """vLLM on CPUs dies of a prompt that it computes in two parts, with a seed: eight prompts of 60 tokens,
    320 per pass."""

    requests = [[2 + (i + k) % 60 for k in range(60)] for i in range(8)]
    version = there.engine.version
    for prompt, completion in zip(requests, await there.all_of(requests, sampling(8)), strict=True):
        assert completion.logprobs == pytest.approx(there.plain(version, prompt, completion), abs=1e-4)


async def test_greedy_has_logprobs_of_the_unscaled_distribution(there: World) -> None:
    prompt = prompts(1)[0]
    greedy, sampled = await asyncio.gather(
        there.generate(prompt, sampling(temperature=0.0)), there.generate(prompt, sampling(temperature=1.5))
    )
    assert greedy.logprobs == pytest.approx(there.plain(there.engine.version, prompt, greedy), abs=1e-4)
    assert sampled.logprobs == pytest.approx(
        there.plain(there.engine.version, prompt, sampled, 1.5), abs=1e-4
    )


async def test_truncated_sampling_is_refused_where_its_logprobs_would_be_wrong(there: World) -> None:
    with pytest.raises(ValueError, match="was started for no truncation"):
        await there.generate([5], sampling(top_p=0.9))


async def test_a_seed_fixes_the_response_whoever_else_is_in_the_batch(there: World) -> None:
    prompt = prompts(1)[0]
    alone = await there.generate(prompt, sampling(), seed=5)
    together = (
        await asyncio.gather(there.generate(prompt, sampling(), seed=5), there.all_of(prompts(6), sampling()))
    )[0]
    other = await there.generate(prompt, sampling(), seed=6)
    assert alone.tokens == together.tokens
    assert alone.tokens != other.tokens


async def test_a_response_ends_at_its_stop_string_which_stays_in_it(there: World) -> None:
    prompt = prompts(1)[0]
    seed = 8331082630762855908  # one whose tokens all have characters
    free = await there.generate(prompt, sampling(40, temperature=0.6), seed=seed)
    text = [tiny.VOCABULARY_INVERSE[token] for token in free.tokens]
    stop = "".join(text[6:8])
    end = next(i for i in range(1, len(text)) if "".join(text[i - 1 : i + 1]) == stop)
    stopped = await there.generate(prompt, sampling(40, temperature=0.6, stop=("zzz", stop)), seed=seed)
    assert stopped.tokens == free.tokens[: end + 1]
    assert stopped.finish_reason == "stop"
    well_formed(stopped)


async def _in_flight_loads(
    there: World, interrupt: str
) -> tuple[list[list[int]], list[Completion], list[int]]:
    """24 requests on 8 slots; two more versions are loaded after some tokens. The versions before, between
    and after."""
    versions = [there.engine.version]
    requests = prompts(24)
    generating = asyncio.create_task(there.all_of(requests, sampling(100, temperature=0.8)))
    for _ in range(2):
        await there.sampled(100)
        versions.append(there.newer())
        report = await there.load(versions[-1], interrupt)  # type: ignore[arg-type]
        print(f"{interrupt}: load {report.load_s * 1e3:.1f} ms, pause {report.pause_s * 1e3:.1f} ms")
        assert 0 < report.load_s <= report.pause_s
        assert there.engine.version == versions[-1]
    completions = await generating
    for completion in completions:
        well_formed(completion)
    return requests, completions, versions


def _check_spans(
    there: World, prompt: list[int], completion: Completion, versions: set[int], tolerance: float
) -> None:
    for version in versions & set(completion.versions):
        expected = there.plain(version, prompt, completion, 0.8)
        span = [i for i, v in enumerate(completion.versions) if v == version]
        assert [completion.logprobs[i] for i in span] == pytest.approx(
            [expected[i] for i in span], abs=tolerance
        )


async def test_recompute_kv_makes_each_span_the_new_weights_own(there: World) -> None:
    requests, completions, versions = await _in_flight_loads(there, "recompute-kv")
    assert max(len(set(completion.versions)) for completion in completions) >= 2
    assert {version for completion in completions for version in completion.versions} == set(versions)
    for prompt, completion in zip(requests, completions, strict=True):
        _check_spans(there, prompt, completion, set(versions), 1e-4)


async def test_every_turn_of_an_episode_has_the_logprobs_of_the_weights_that_sampled_it(
    there: World, model_dir: Path
) -> None:
    """Weights are loaded with recompute-kv while some episodes sample and others are between turns."""

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokenizer.chat_template = TEMPLATE
    means = Means(there.engine, Chat(tokenizer), Questions, Limits(64, 250, max_turns=8), Slots(8, hold=True))
    runner, versions = GroupRunner(means, sampling(40, temperature=0.8)), [there.engine.version]
    running = asyncio.create_task(runner.run(group(n=12), lambda finished: None))
    for _ in range(2):
        await there.sampled(200)
        versions.append(there.newer())
        await there.load(versions[-1], "recompute-kv")
    result, payload = await running
    assert {meta.num_turns for meta in result.trajectories} == {3}
    assert {version for meta in result.trajectories for version, _ in meta.version_tokens} == set(versions)
    assert max(meta.span for meta in result.trajectories) >= 1
    for trajectory in payload.trajectories:
        (segment,) = trajectory.segments()
        for version in {*segment["versions"].tolist()} - {-1}:
            expected = [
                0.0,
                *tiny.plain_logprobs(there.model, there.weights[version], segment["tokens"].tolist(), 0.8),
            ]
            span = [t for t, other in enumerate(segment["versions"]) if other == version]
            assert segment["logprobs"][span].tolist() == pytest.approx([expected[t] for t in span], abs=1e-4)


async def test_what_a_cut_has_kept_goes_on_after_a_resume_and_stays_as_it_was(
    there: World, model_dir: Path, tmp_path: Path
) -> None:
    """Tokens, logprobs and versions of two weights are saved as a checkpoint saves them; a third one goes on
    from them."""

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokenizer.chat_template = None
    means = Means(
        there.engine, Chat(tokenizer), partial(OneTurn, Rewards()), Limits(64, 320), Slots(8, hold=True)
    )
    runner, request = GroupRunner(means, sampling(200, temperature=0.8)), group(n=6)
    versions = [there.newer()]
    await there.load(versions[0], "recompute-kv")
    running = asyncio.create_task(runner.run(request, lambda finished: None))
    await there.sampled(120)
    versions.append(there.newer())
    await there.load(versions[1], "recompute-kv")
    await there.sampled(120)
    told, saved = runner.partial_responses()
    running.cancel()
    await asyncio.wait([running])
    kept = told.responses[request.key]
    assert {version for one in kept.values() for version, _ in one.version_tokens} == set(versions)

    keys = {KEY: dict.fromkeys(kept, "so-far")}
    write_payloads(tmp_path, joined_by_index(keys, {"so-far": saved[0].trajectories}))
    (read,) = read_payloads(tmp_path)
    versions.append(there.newer())
    await there.load(versions[2], "recompute-kv")
    sampled = there.engine.sampled_tokens
    result, payload = await runner.run(
        replace(request, key=PartKey(KEY, 1), partial=kept), lambda finished: None, read
    )
    assert there.engine.sampled_tokens - sampled == result.response_tokens - sum(
        one.tokens for one in kept.values()
    )
    assert sum(not one.is_whole for one in kept.values()) >= 2, "the others ended before the cut"
    for index, trajectory in enumerate(payload.trajectories):
        (segment,), (before,) = trajectory.segments(), read.trajectories[index].segments()
        start = int(np.argmax(segment["mask"]))
        end = start + len(before["tokens"])
        for name in ("tokens", "logprobs", "versions"):
            np.testing.assert_array_equal(segment[name][start:end], before[name])
        assert set(segment["versions"][end:].tolist()) == (set() if kept[index].is_whole else {versions[2]})
        for version in versions:
            expected = [
                0.0,
                *tiny.plain_logprobs(there.model, there.weights[version], segment["tokens"].tolist(), 0.8),
            ]
            span = [t for t, other in enumerate(segment["versions"]) if other == version]
            assert segment["logprobs"][span].tolist() == pytest.approx([expected[t] for t in span], abs=1e-4)


async def test_keep_kv_marks_the_spans_and_goes_on_with_the_old_cache(there: World) -> None:
    requests, completions, _ = await _in_flight_loads(there, "keep-kv")
    for prompt, completion in zip(requests, completions, strict=True):
        _check_spans(there, prompt, completion, {completion.versions[0]}, 1e-4)
    prompt, mixed = next(
        (p, c) for p, c in zip(requests, completions, strict=True) if len(set(c.versions)) > 1
    )
    border = next(i for i, version in enumerate(mixed.versions) if version != mixed.versions[0])
    for version in (mixed.versions[0], mixed.versions[border]):
        assert abs(mixed.logprobs[border] - there.plain(version, prompt, mixed, 0.8)[border]) > 1e-4


@pytest.mark.parametrize("max_response_tokens", [1, 24])
async def test_a_request_that_a_load_overtakes_on_its_way_begins_again(
    there: World, monkeypatch: pytest.MonkeyPatch, max_response_tokens: int
) -> None:
    """It was let in, and its salt chosen, before the load; vLLM hears of it after. Its cached prefix is of
    older weights."""

    long = [3 + i % 43 for i in range(MAX_PROMPT_TOKENS)]
    how = sampling(max_response_tokens)
    await there.generate(long, how)
    on_its_way, loaded = asyncio.Event(), asyncio.Event()
    llm = there.engine.llm
    assert llm is not None
    add_request = llm.add_request

    async def add_late(*args: object, **options: object) -> object:
        if not on_its_way.is_set():
            on_its_way.set()
            await loaded.wait()
        return await add_request(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(llm, "add_request", add_late)
    overtaken = asyncio.create_task(there.generate(long, how))
    await on_its_way.wait()
    version = there.newer()
    await there.load(version, "keep-kv")
    sampled = there.engine.sampled_tokens
    loaded.set()
    completion = await overtaken
    well_formed(completion)
    assert set(completion.versions) == {version}
    assert completion.logprobs == pytest.approx(there.plain(version, long, completion), abs=1e-4)
    assert there.engine.sampled_tokens - sampled == len(completion.tokens)


async def test_without_the_salt_a_new_request_would_meet_prefixes_of_older_weights(
    there: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the salt is for: with one and the same salt, the cached keys and values are those of the weights
    before."""

    from vllm.inputs.engine import tokens_input

    monkeypatch.setattr(
        vllm_requests, "prompt", lambda tokens, version: tokens_input(tokens, cache_salt="the same")
    )
    long = [3 + i % 47 for i in range(MAX_PROMPT_TOKENS)]
    await there.generate(long, sampling())
    version = there.newer()
    await there.load(version, "keep-kv")
    completion = await there.generate(long, sampling())
    assert set(completion.versions) == {version}
    plain = there.plain(version, long, completion)
    differences = [abs(got - expected) for got, expected in zip(completion.logprobs, plain, strict=True)]
    print(f"largest difference of logprobs with reused old prefixes: {max(differences):.3f}")
    assert max(differences) > 1e-2


async def test_drain_lets_running_responses_end_on_their_version(there: World) -> None:
    requests, completions, versions = await _in_flight_loads(there, "drain")
    assert all(len(set(completion.versions)) == 1 for completion in completions)
    assert {completion.versions[0] for completion in completions} == set(versions)
    for prompt, completion in zip(requests, completions, strict=True):
        _check_spans(there, prompt, completion, set(versions), 1e-4)


@pytest.mark.parametrize("interrupt", ["drain", "keep-kv", "recompute-kv"])
async def test_a_load_that_does_not_fit_leaves_the_old_version_serving(there: World, interrupt: str) -> None:
    version = there.engine.version
    bad = tiny.weights_after(there.model, 1)
    bad["model.norm.weight"] = bad["model.norm.weight"][:-1]
    del bad["lm_head.weight"]
    bad["surprise"] = bad["model.norm.weight"]
    bad["model.layers.0.mlp.up_proj.weight"] = bad["model.layers.0.mlp.up_proj.weight"].to(torch.int8)
    generating = asyncio.create_task(there.all_of(prompts(4), sampling()))
    await there.sampled(20)
    with pytest.raises(
        ValueError,
        match=r"missing lm_head.weight; unknown surprise; wrong shape model.norm.weight; wrong dtype model",
    ):
        await there.load_these(bad, version + 1, interrupt)  # type: ignore[arg-type]
    for prompt, completion in zip(prompts(4), await generating, strict=True):
        assert set(completion.versions) == {version}
        assert completion.logprobs == pytest.approx(there.plain(version, prompt, completion), abs=1e-4)
    assert there.engine.version == version


async def test_a_cancelled_drain_resumes_on_the_old_version(there: World) -> None:
    version = there.engine.version
    generating = asyncio.create_task(there.all_of(prompts(4), sampling(100, temperature=0.3)))
    await there.sampled(20)
    loading = asyncio.create_task(there.load_these(tiny.weights_after(there.model, 1), version + 1, "drain"))
    while there.engine.gate.is_open:  # noqa: ASYNC110  (the load closes it in its first turns)
        await asyncio.sleep(0)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert {v for completion in await generating for v in completion.versions} == {version}
    assert (await there.generate([5, 6], sampling(4))).tokens


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_score_equals_plain_forwards_of_the_loaded_weights(there: World, temperature: float) -> None:
    generating = asyncio.create_task(there.all_of(prompts(4), sampling()))
    version = there.newer()
    await there.load(version, "keep-kv")
    sequences = prompts(6)
    scores = await there.engine.score(sequences, temperature)
    for sequence, logprobs in zip(sequences, scores.logprobs, strict=True):
        plain = tiny.plain_logprobs(there.model, there.weights[version], sequence, temperature)
        assert logprobs == pytest.approx(plain, abs=1e-4)
    await generating


async def test_abort_returns_what_there_is_and_frees_the_slot(there: World) -> None:
    how = sampling(MAX_RESPONSE_TOKENS, temperature=0.1)
    running = [asyncio.create_task(there.engine.generate(f"a{i}", [5, 6, 7], how, i)) for i in range(9)]
    await there.sampled(40)
    await there.engine.abort("a8")
    await there.engine.abort("unknown")
    assert await running[8] == Completion(tokens=[], logprobs=[], versions=[], finish_reason="abort")
    known = there.engine.tokens_of("a0")
    for i in range(8):
        await there.engine.abort(f"a{i}")
    aborted = await running[0]
    assert aborted.finish_reason == "abort"
    assert 0 < known <= len(aborted.tokens) < MAX_RESPONSE_TOKENS
    well_formed(aborted)
    await asyncio.gather(*running)
    assert there.engine.running == 0


async def test_an_abort_right_after_the_start_is_not_lost(there: World) -> None:
    running = asyncio.create_task(
        there.engine.generate("early", [5, 6, 7], sampling(MAX_RESPONSE_TOKENS, temperature=0.1), 0)
    )
    await asyncio.sleep(0)
    await there.engine.abort("early")
    assert (await running).finish_reason == "abort"


async def test_a_cancelled_generate_gives_its_slot_back(there: World) -> None:
    running = asyncio.create_task(there.generate([5, 6, 7], sampling(MAX_RESPONSE_TOKENS, temperature=0.1)))
    await there.sampled(5)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert there.engine.running == 0


async def test_decode_steps_are_the_passes_that_sampled_tokens_of_responses(there: World) -> None:
    engine = there.engine
    version = there.newer()
    await there.load(version, "drain")
    before, tokens = engine.decode_steps, engine.sampled_tokens
    alone = await there.generate([5, 6, 7], sampling(20))
    assert engine.decode_steps - before == engine.sampled_tokens - tokens == len(alone.tokens)
    before = engine.decode_steps
    llm = engine.llm
    assert llm is not None
    async with paused(llm, "keep-kv"):  # so that all begin in one pass
        generating = asyncio.gather(*(there.generate([5, 6, 7], sampling(20), seed=2) for _ in range(8)))
        while len(llm.output_processor.request_states) < 8:  # noqa: ASYNC110  (each comes in a turn of its own task)
            await asyncio.sleep(0)
    longest = max(len(completion.tokens) for completion in await generating)
    # the last one may still be on its way to the engine
    assert longest <= engine.decode_steps - before <= longest + 1
    before = engine.decode_steps
    await engine.score(prompts(3), 1.0)
    await engine.score(prompts(1), 0.7)
    assert engine.decode_steps == before


async def test_prompt_tokens_are_counted_and_those_that_were_cached(there: World) -> None:
    await there.load(there.newer(), "drain")
    long = [3 + i % 41 for i in range(MAX_PROMPT_TOKENS)]
    begun = await counted(there, 0)
    await there.generate(long, sampling(4))
    first = await counted(there, begun[0] + len(long))
    await there.all_of([long, long, long], sampling(4))
    later = await counted(there, first[0] + 3 * len(long))
    await there.engine.score(prompts(3), 1.0)
    # The page with the last token is computed again: its logits are needed.
    assert (first[1] - begun[1], later[1] - first[1]) == (0, 3 * (len(long) - PAGE_TOKENS))
    assert await counted(there, 0) == later


async def counted(there: World, at_least: float) -> tuple[float, float]:
    """Prompt tokens, and those that were cached. vLLM counts a request just after its last token was
    delivered."""
    while (sums := there.engine.counters().sums)["prompt_tokens"] < at_least:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    return sums["prompt_tokens"], sums["cached_prompt_tokens"]


async def test_a_group_computes_the_whole_pages_of_its_prompt_once(there: World) -> None:
    await prefixes.check_prompt_is_computed_once(there, rest=len(prefixes.PROMPT) % PAGE_TOKENS)


@pytest.mark.parametrize("interrupt", ["keep-kv", "recompute-kv", "drain"])
async def test_after_a_load_nobody_uses_what_older_weights_have_computed(
    there: World, interrupt: Interrupt
) -> None:
    await prefixes.check_nothing_older_is_used(there, interrupt)


async def test_a_prompt_shared_across_a_load_would_be_noticed(
    there: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = vllm_requests.prompt
    monkeypatch.setattr(vllm_requests, "prompt", lambda tokens, version: prompt(tokens, 0))
    with pytest.raises(AssertionError):
        await prefixes.check_nothing_older_is_used(there, "keep-kv")


@pytest.mark.parametrize("interrupt", ["keep-kv", "recompute-kv", "drain"])
async def test_only_a_later_turn_meets_the_cache_of_older_weights_and_only_under_keep_kv(
    there: World, interrupt: Interrupt
) -> None:
    async def cached(tokens: list[int], **turn: int) -> tuple[float, Completion]:
        before = await counted(there, 0)
        completion = await there.generate(tokens, sampling(8), **turn)
        return (await counted(there, before[0] + len(tokens)))[1] - before[1], completion

    await there.load(there.newer(), "drain")
    question = [3 + i % 37 for i in range(MAX_PROMPT_TOKENS)]
    answer = await there.generate(question, sampling(40))
    begun = answer.versions[0]
    second = question + answer.tokens + [5, 6, 7]
    pages = (len(second) - 1) // PAGE_TOKENS * PAGE_TOKENS
    same_weights, completion = await cached(second, first_version=begun)
    assert same_weights == pages
    assert completion.logprobs == pytest.approx(there.plain(begun, second, completion), abs=1e-4)
    version = there.newer()
    await there.load(version, interrupt)
    new_trajectory, completion = await cached(second)
    assert new_trajectory == 0
    assert completion.logprobs == pytest.approx(there.plain(version, second, completion), abs=1e-4)
    later_turn, completion = await cached(second, first_version=begun)
    assert set(completion.versions) == {version}
    assert later_turn == (pages if interrupt == "keep-kv" else 0)
    is_new_alone = completion.logprobs == pytest.approx(there.plain(version, second, completion), abs=1e-4)
    assert is_new_alone == (interrupt != "keep-kv")


async def test_a_cache_that_is_too_small_is_told_by_counters_and_changes_no_logprob(there: World) -> None:
    engine = there.engine
    assert engine.counters().sums["preemptions"] == 0  # though tests before have cleared the caches
    version = there.newer()
    await there.load(version, "drain")
    most = {"kv_cache_usage": 0.0, "engine_running": 0.0, "engine_waiting": 0.0}
    for first in range(5, 45, 8):  # an answer may still end early
        requests = [[first + i] * MAX_PROMPT_TOKENS for i in range(8)]
        generating = asyncio.create_task(
            there.all_of(requests, sampling(MAX_RESPONSE_TOKENS, temperature=0.25))
        )
        while not generating.done():
            most = {name: max(value, engine.counters().gauges.get(name, 0.0)) for name, value in most.items()}
            await asyncio.sleep(0.001)
        if engine.counters().sums["preemptions"] > 0:
            break
    print(engine.counters(), most)
    assert engine.counters().sums["preemptions"] > 0
    assert 0.9 < most["kv_cache_usage"] <= 1
    assert (most["engine_running"], most["engine_waiting"] > 0) == (8, True)
    for prompt, completion in zip(requests, generating.result(), strict=True):
        well_formed(completion)
        assert completion.logprobs == pytest.approx(there.plain(version, prompt, completion, 0.25), abs=1e-4)


def test_a_killed_engine_fails_all_that_wait_for_it(there: World) -> None:
    """The module's last test: it ends the engine."""
    there.run(lambda: kill_and_expect(there, "EngineCore", "EngineCore with SIGKILL"))
