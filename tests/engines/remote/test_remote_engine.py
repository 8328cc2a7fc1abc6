"""The engine `remote` against a real server: the tests of vLLM's engine that ask what every engine promises
(imported, with a server behind `there`), and what only a server can do wrong."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3ForCausalLM

from asyncrl_cli.base.errors import ExecutorFailed, PreflightError
from asyncrl_cli.engines.port import Completion, check_engine
from asyncrl_cli.engines.remote import KIND, remote_engine, server
from asyncrl_cli.engines.remote.remote_engine import RemoteEngine
from asyncrl_cli.weights.directory import versions_at
from asyncrl_cli.weights.directory_buckets import DirectorySender
from asyncrl_cli.weights.receivers import manifest_of
from asyncrl_cli.weights.versions import send
from tests.engines import tiny
from tests.engines.made import made_for, prompts, sampling
from tests.engines.remote.server_world import (
    MAX_RESPONSE_TOKENS,
    SIZES,
    RemoteWorld,
    Served,
    remote_profile,
    remote_world,
    serving,
)
from tests.engines.vllm import test_vllm_engine as contract
from tests.packed import pack

pytestmark = pytest.mark.slow

test_greedy = contract.test_greedy_has_logprobs_of_the_unscaled_distribution
test_scaled_logprobs = contract.test_logprobs_are_of_the_scaled_distribution
test_a_seed = contract.test_a_seed_fixes_the_response_whoever_else_is_in_the_batch
test_recompute_kv = contract.test_recompute_kv_makes_each_span_the_new_weights_own
test_keep_kv = contract.test_keep_kv_marks_the_spans_and_goes_on_with_the_old_cache
test_drain = contract.test_drain_lets_running_responses_end_on_their_version
test_turns = contract.test_every_turn_of_an_episode_has_the_logprobs_of_the_weights_that_sampled_it
test_score = contract.test_score_equals_plain_forwards_of_the_loaded_weights
test_an_early_abort = contract.test_an_abort_right_after_the_start_is_not_lost


@pytest.fixture(scope="module", autouse=True)
def _many_polls() -> Iterator[None]:
    """The contract's tests wait for numbers of tokens, which the polls bring."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote_engine, "POLL_S", 0.01)
        yield


@pytest.fixture(scope="module")
def served(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("served") / "token", model_dir, *SIZES) as started:
        yield started


@pytest.fixture(scope="module")
def there(
    model: Qwen3ForCausalLM, model_dir: Path, served: Served, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RemoteWorld]:
    with remote_world(model, model_dir, served, tmp_path_factory.mktemp("published")) as world:
        yield world


@pytest.mark.parametrize("interrupt", ["drain", "keep-kv", "recompute-kv"])
async def test_weights_of_another_model_are_refused_and_the_old_version_goes_on(
    there: RemoteWorld, interrupt: Any
) -> None:
    version = there.engine.version
    bad = tiny.weights_after(there.model, 1)
    bad["model.norm.weight"] = bad["model.norm.weight"][:-1].clone()
    del bad["lm_head.weight"]
    with pytest.raises(
        ValueError, match=r"server http://\S+ .* missing lm_head.weight; wrong shape model.norm.weight"
    ):
        await there.load_these(bad, version + 1, interrupt)
    completion = await there.generate([5, 6, 7], sampling())
    assert set(completion.versions) == {version} == {there.engine.version}
    assert completion.logprobs == pytest.approx(there.plain(version, [5, 6, 7], completion), abs=1e-4)
    await there.load(there.newer(), interrupt)


async def test_a_version_on_a_shared_disk_is_loaded_by_its_path(
    there: RemoteWorld, model_dir: Path, tmp_path: Path
) -> None:
    version = there.newer()
    buckets = pack(there.weights[version], 300_000)
    profile, _ = made_for(model_dir, transport="disk")
    sender = DirectorySender(versions_at(profile.weights, tmp_path))
    refs = send(sender, manifest_of(buckets, version), buckets)
    assert refs[0].version_at == f"file://{tmp_path}/weights/version-{version:06d}"
    await there.engine.load(
        await asyncio.to_thread(there.engine.fetch, refs[0].version_at), version, "keep-kv"
    )
    completion = await there.generate([5, 6, 7], sampling())
    assert set(completion.versions) == {version}
    assert completion.logprobs == pytest.approx(there.plain(version, [5, 6, 7], completion), abs=1e-4)


async def test_a_stop_string_ends_a_response_and_stays_in_it(there: RemoteWorld) -> None:
    free = await there.generate([5, 6, 7], sampling(40, temperature=0.6), seed=1)
    text = "".join(tiny.VOCABULARY_INVERSE.get(token, "\0") for token in free.tokens)
    stop = text[6:8]
    stopped = await there.generate([5, 6, 7], sampling(40, temperature=0.6, stop=("zzz", stop)), seed=1)
    assert stopped.tokens == free.tokens[: text.index(stop) + 2]
    assert stopped.finish_reason == "stop"


async def test_what_another_engine_began_is_continued(there: RemoteWorld) -> None:
    version = there.newer()
    await there.load(version, "keep-kv")
    prompt = prompts(1)[0]
    begun = Completion(tokens=[9, 8, 7], logprobs=[-1.0] * 3, versions=[0] * 3, finish_reason="abort")
    whole = await there.generate(prompt, sampling(10, temperature=0.1), so_far=begun)
    assert (whole.tokens[:3], whole.versions[:3], len(whole.tokens)) == ([9, 8, 7], [0, 0, 0], 10)
    plain = there.plain(version, prompt, whole, 0.1)
    assert whole.logprobs[3:] == pytest.approx(plain[3:], abs=1e-3)
    assert set(whole.versions[3:]) == {version}


async def test_an_abort_and_a_cancel_free_the_slot_here_and_there(there: RemoteWorld) -> None:
    how = sampling(MAX_RESPONSE_TOKENS, temperature=0.1)
    running = [asyncio.create_task(there.engine.generate(f"a{i}", [5, 6, 7], how, i)) for i in range(2)]
    await there.sampled(2)
    running[0].cancel()
    await there.engine.abort("a1")
    assert await running[1] == Completion(tokens=[], logprobs=[], versions=[], finish_reason="abort")
    with pytest.raises(asyncio.CancelledError):
        await running[0]
    assert there.engine.running == 0
    version = there.newer()
    async with asyncio.timeout(5):  # a drain waits for what still runs there
        await there.load(version, "drain")


def test_a_server_that_has_served_before_counts_on_and_the_run_from_its_own_version(
    model: Qwen3ForCausalLM, model_dir: Path, served: Served, there: RemoteWorld, tmp_path: Path
) -> None:
    before = facts_at(served)["version"]
    with remote_world(model, model_dir, served, tmp_path) as other:
        completion = other.run(lambda: other.generate([5, 6], sampling(8)))
    assert set(completion.versions) == {0}
    assert facts_at(served)["version"] == before + 1
    with pytest.raises(ExecutorFailed, match=rf"{served.url}.*it was restarted, or others use it"):
        there.run(lambda: load_a_newer(there))


async def load_a_newer(there: RemoteWorld) -> None:
    await there.load(there.newer(), "keep-kv")


def facts_at(served: Served) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {served.token_file.read_text().strip()}"}
    with urllib.request.urlopen(urllib.request.Request(f"{served.url}{server.FACTS}", headers=headers)) as it:
        facts: dict[str, Any] = json.load(it)
        return facts


def test_a_killed_server_loses_its_requests_and_comes_back_with_the_newest_weights_only(
    model: Qwen3ForCausalLM, model_dir: Path, tmp_path: Path
) -> None:
    with serving(tmp_path / "token", model_dir, *SIZES) as served:
        with remote_world(model, model_dir, served, tmp_path) as lost:

            async def kill_in_the_middle() -> None:
                how = sampling(MAX_RESPONSE_TOKENS, temperature=0.1)
                asked = asyncio.create_task(lost.generate([5, 6, 7], how))
                await lost.sampled(3)
                await asyncio.to_thread(served.end)
                with pytest.raises(ExecutorFailed, match=served.url):
                    await asked
                with pytest.raises(ExecutorFailed, match=served.url):
                    await lost.generate([5], how)

            lost.run(kill_in_the_middle)
        served.start()
        assert facts_at(served)["version"] == 0
        with asyncio.Runner() as runner:
            engine = RemoteEngine(*remote_profile(served, model_dir))
            again = RemoteWorld(model, engine, runner, tmp_path)
            again.weights[6] = tiny.weights_after(model, 3)

            async def nothing_before_the_load() -> Completion:
                await engine.start()
                early = asyncio.create_task(again.generate([5, 6], sampling(8)))
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(early), 0.3)
                await again.load(6, "keep-kv")
                completion = await early
                await engine.close()
                return completion

            completion = again.run(nothing_before_the_load)
        assert set(completion.versions) == {6}
        assert completion.logprobs == pytest.approx(again.plain(6, [5, 6], completion), abs=1e-4)


def test_a_server_that_hangs_is_lost_within_the_limit(
    model: Qwen3ForCausalLM,
    model_dir: Path,
    served: Served,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server.Server.ask, "__defaults__", (None, 0.5))
    silent = rf"{served.url}: no answer to /async_rl/server within 0.5 s"
    with remote_world(model, model_dir, served, tmp_path) as there, served.hanging():  # noqa: SIM117
        with pytest.raises(ExecutorFailed, match=silent):
            there.run(lambda: there.generate([5], sampling(8)))


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"slots": 9}, "rollout.slots is 8 there, and 9 here"),
        ({"max_response_tokens": 300}, "rollout.max_response_tokens is 256 there, and 300 here"),
        ({"dtype": "bfloat16"}, "model.dtype is float32 there, and bfloat16 here"),
        ({"urls": ("http://127.0.0.1:9",)}, "http://127.0.0.1:9: cannot be reached: connection refused"),
    ],
)
def test_a_server_that_does_not_fit_is_refused_by_name(
    model_dir: Path, served: Served, changes: dict[str, Any], refusal: str
) -> None:
    profile, _ = remote_profile(served, model_dir, **changes)
    with pytest.raises(PreflightError, match=refusal) as refused:
        check_engine(profile, "cpu")
    assert refused.value.hint


def test_another_tokenizer_a_wrong_token_and_no_token_are_refused(
    model: Qwen3ForCausalLM, model_dir: Path, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tiny.save(model, tmp_path / "other")
    file = other / "tokenizer.json"
    file.write_text(file.read_text().replace('"a": ', '"A": '))
    engine = RemoteEngine(*remote_profile(served, other))
    with asyncio.Runner() as runner:
        with pytest.raises(ExecutorFailed, match=r"vocabulary is \w+ there") as refused:
            runner.run(engine.start())
        runner.run(engine.close())
    assert f"--model {other}" in refused.value.hint
    profile, _ = remote_profile(served, other)
    check_engine(profile, "cpu")
    with pytest.raises(PreflightError, match=r"vocabulary is \w+ there"):  # the driver's, once it has a model
        KIND.check_servers(profile, other)
    KIND.check_servers(profile, model_dir)

    (tmp_path / "wrong").write_text("a token of somebody else")
    (tmp_path / "wrong").chmod(0o600)
    profile, _ = remote_profile(served, model_dir, token_file=str(tmp_path / "wrong"))
    with pytest.raises(PreflightError, match="401") as refused:
        check_engine(profile, "cpu")
    assert "somebody" not in str(refused.value)

    monkeypatch.delenv(server.REMOTE_TOKEN, raising=False)
    profile, _ = remote_profile(served, model_dir, token_file=None)
    with pytest.raises(PreflightError, match=f"the environment has no {server.REMOTE_TOKEN}"):
        check_engine(profile, "cpu")
    monkeypatch.setenv(server.REMOTE_TOKEN, served.token_file.read_text().strip())
    check_engine(profile, "cpu")


RIGHT = {
    "choices": [
        {
            "token_ids": [3, 4],
            "logprobs": {"token_logprobs": [-1.0, -2.0]},
            "weight_versions": [7, 7],
            "finish_reason": "length",
        }
    ],
    "prompt_token_ids": [5],
}


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"token_ids": [3, 64]},
        {"token_ids": [3]},
        {"weight_versions": [7, 8]},
        {"weight_versions": None},
        {"logprobs": None},
        {"logprobs": {"token_logprobs": [-1.0, float("nan")]}},
    ],
)
async def test_an_answer_of_other_weights_or_without_what_training_needs_is_refused(
    there: RemoteWorld, wrong: dict[str, Any]
) -> None:
    engine = RemoteEngine(there.engine._profile, there.engine._place)
    engine._facts, engine._versions = {"vocab_size": 64}, {7: 2}
    track = remote_engine.Track(request_id="r", prompt_tokens=[5], sampling=sampling(2), seed=0)
    answer = {**RIGHT, "choices": [{**RIGHT["choices"][0], **wrong}]}  # type: ignore[index]
    if wrong:
        with pytest.raises(ExecutorFailed, match="an answer lacks tokens, logprobs or versions"):
            engine._checked(track, [5], answer)
        assert not track.tokens
    else:
        assert engine._checked(track, [5], answer) == "length"
        assert (track.tokens, track.versions) == ([3, 4], [2, 2])
    with pytest.raises(ExecutorFailed):
        engine._checked(track, [6], answer)  # to another prompt
