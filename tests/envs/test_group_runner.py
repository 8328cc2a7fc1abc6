"""Parts of groups, and evals, on a real engine with a tiny model."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from transformers import AutoTokenizer, Qwen3ForCausalLM

from asyncrl_cli.base.errors import ExecutorFailed
from asyncrl_cli.checkpoint.payloads import read_payloads, write_payloads
from asyncrl_cli.contracts.environment import Answer, End, Environment, OneTurn, SelfPlayed, Turn
from asyncrl_cli.contracts.ports import EvalRequest, EvalTry, PartialResult
from asyncrl_cli.contracts.prompt_group import (
    AttemptKey,
    PartKey,
    PartRequest,
    TrajectoryFailure,
    TrajectoryMeta,
)
from asyncrl_cli.data.trajectories import GroupPayload, joined_by_index
from asyncrl_cli.engines.port import Sampling
from asyncrl_cli.engines.transformers.transformers_engine import TransformersEngine
from asyncrl_cli.envs.chat import Chat, render_prompts
from asyncrl_cli.envs.episode import Episode, Limits, Means
from asyncrl_cli.envs.group_runner import GroupRunner
from asyncrl_cli.envs.slots import Slots
from asyncrl_cli.sandbox.parent_rewards import RewardFailed
from asyncrl_cli.train.batch import step_batches
from asyncrl_cli.train.step_plan import OptimizerStepPlan, PlannedTrajectory, RankPlan
from tests.engines import tiny
from tests.engines.brake import Brake
from tests.engines.made import made_for
from tests.train.train_samples import OneRank
from tests.waiting import until

KEY = AttemptKey("sorting-7", 2, 1)
SAMPLING = Sampling(temperature=0.9, max_response_tokens=48)
LONG = Sampling(temperature=0.9, max_response_tokens=128)
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt "
    "%}<assistant>{% endif %}"
)
ITEM = {"uid": "sorting-7", "prompt": "4,1,9=", "answer": "1,4,9", "metadata": {}}


RESTART = 1000


class Rewards:
    """Reward is the length of the text; a text with `fails_on` in it has none; `hangs` never answers."""

    def __init__(self, *, fails_on: str = "", hangs: bool = False) -> None:
        self.fails_on = fails_on
        self.hangs = hangs
        self.texts: list[str] = []

    async def score(self, item: dict[str, Any], response_text: str) -> float:
        self.texts.append(response_text)
        if self.hangs:
            await asyncio.get_running_loop().create_future()
        if self.fails_on and self.fails_on in response_text:
            raise RewardFailed("no verdict")
        return float(len(response_text))


@asynccontextmanager
async def runner_of(
    model_dir: Path, rewards: Rewards, make_environment: Callable[[], Any] | None = None, **changes: Any
) -> AsyncIterator[GroupRunner]:
    engine = TransformersEngine(*made_for(model_dir, slots=8, max_prompt_tokens=64, max_response_tokens=128))
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokenizer.chat_template = changes.pop("chat_template", None)
    on_waiting, hold = changes.pop("on_waiting", lambda episode, for_what: None), changes.pop("hold", True)
    most_requeues = changes.pop("most_requeues", None)
    sampling, limits = changes.pop("sampling", SAMPLING), Limits(64, 192, max_turns=8)._replace(**changes)
    means = Means(
        engine,
        Chat(tokenizer),
        make_environment or partial(OneTurn, rewards),
        limits,
        Slots(8, hold=hold),
        on_waiting,
        mixes=most_requeues is None,
    )
    try:
        async with asyncio.timeout(60):
            await engine.start()
            yield GroupRunner(means, sampling, most_requeues or 0)
    finally:
        await engine.close()


def group(n: int = 8, seed: int = 5, item: dict[str, Any] = ITEM) -> PartRequest:
    """A whole group as one part."""
    return part(0, range(n), seed, item)


def part(number: int, indices: Iterable[int], seed: int = 5, item: dict[str, Any] = ITEM) -> PartRequest:
    return PartRequest(key=PartKey(KEY, number), item=item, indices=tuple(indices), seed=seed)


@pytest.mark.slow
async def test_a_group_becomes_metadata_and_arrays_that_agree(
    model: Qwen3ForCausalLM, model_dir: Path
) -> None:
    finished: list[int] = []
    async with runner_of(model_dir, Rewards()) as runner:
        result, payload = await runner.run(group(), finished.append)
    assert finished == [1, 2, 3, 4, 5, 6, 7, 8]
    assert (result.key, result.failures, result.failed_tokens, result.payload) == (
        PartKey(KEY, 0),
        (),
        0,
        None,
    )
    assert (payload.uid, payload.epoch, payload.attempt) == tuple(KEY)
    assert len({tuple(next(t.segments())["tokens"]) for t in payload.trajectories}) == 8
    prompt = [tiny.VOCABULARY[character] for character in ITEM["prompt"]]
    for meta, trajectory in zip(result.trajectories, payload.trajectories, strict=True):
        (segment,) = trajectory.segments()
        assert segment["tokens"][:6].tolist() == prompt
        assert (meta.prompt_tokens, meta.response_tokens) == (6, len(segment["tokens"]) - 6)
        assert meta.version_tokens == ((0, meta.response_tokens),)
        assert (meta.reward, meta.finish_reason) == (
            trajectory.values["reward"],
            trajectory.values["finish_reason"],
        )
        assert not segment["mask"][:6].any()
        assert segment["mask"][6:].all()
        assert set(segment["versions"][:6].tolist()) == {-1}
        assert not segment["logprobs"][:6].any()
        expected = tiny.plain_logprobs(model, model.state_dict(), segment["tokens"].tolist(), 0.9)
        assert segment["logprobs"][6:].tolist() == pytest.approx(expected[5:], abs=1e-5)


@pytest.mark.slow
async def test_a_response_of_a_seed_is_the_same_in_whatever_part_it_is(model_dir: Path) -> None:
    """Parts run at once on one worker, or elsewhere after a worker's death."""

    nothing: Callable[[int], None] = lambda finished: None  # noqa: E731
    async with runner_of(model_dir, Rewards()) as runner:
        _, whole = await runner.run(group(n=5), nothing)
        _, other = await runner.run(group(n=5, seed=6), nothing)
        parts = [part(0, (0, 3)), part(1, (4, 1)), part(2, (2,))]
        ended = await asyncio.gather(*(runner.run(request, nothing) for request in parts))
    placed = [index for request in parts for index in request.indices]
    for index, trajectory in zip(placed, (t for _, part in ended for t in part.trajectories), strict=True):
        assert np.array_equal(
            next(trajectory.segments())["tokens"], next(whole.trajectories[index].segments())["tokens"]
        )
    sampled, differently = (
        [next(trajectory.segments())["tokens"].tolist() for trajectory in payload.trajectories]
        for payload in (whole, other)
    )
    assert sampled != differently
    assert [result.key.number for result, _ in ended] == [0, 1, 2]
    assert [len(result.trajectories) for result, _ in ended] == [2, 2, 1]


async def test_an_abort_ends_all_parts_of_its_attempt_and_no_other(model_dir: Path) -> None:
    later = PartRequest(key=PartKey(KEY._replace(attempt=2), 0), item=ITEM, indices=(0,), seed=5)
    async with runner_of(model_dir, Rewards()) as runner:
        requests = part(0, range(3)), part(1, range(3, 5)), later
        running = [asyncio.create_task(runner.run(request, lambda finished: None)) for request in requests]
        await asyncio.sleep(0)
        await runner.abort(KEY)
        assert [len((await task)[0].trajectories) for task in running] == [0, 0, 1]


@pytest.mark.slow
async def test_a_trajectory_without_a_reward_leaves_the_group(model_dir: Path) -> None:
    rewards = Rewards(fails_on="7")
    async with runner_of(model_dir, rewards) as runner:
        result, payload = await runner.run(group(n=24), lambda finished: None)
    failed = [text for text in rewards.texts if "7" in text]
    assert 0 < len(failed) < 24
    assert len(result.failures) == len(failed)
    assert all(
        "no verdict" in failure.text and "sorting-7@2.1" in failure.text for failure in result.failures
    )
    assert len(result.trajectories) == len(payload.trajectories) == 24 - len(failed)
    assert result.failed_tokens >= sum(len(text) for text in failed)


@pytest.mark.slow
@pytest.mark.parametrize("hangs", [False, True], ids=["while it generates", "while rewards are awaited"])
async def test_an_aborted_group_ends_soon_without_trajectories(model_dir: Path, hangs: bool) -> None:
    finished: list[int] = []
    how = Sampling(temperature=0.9, max_response_tokens=20 if hangs else 128)
    async with runner_of(model_dir, Rewards(hangs=hangs), sampling=how) as runner:
        running = asyncio.create_task(runner.run(group(), finished.append))
        async with asyncio.timeout(30):
            while len(finished) < (8 if hangs else 1):  # noqa: ASYNC110
                await asyncio.sleep(0)
        await runner.abort(KEY)
        await runner.abort(AttemptKey("unknown", 0, 0))
        result, payload = await running
        assert (result.trajectories, result.failures, payload.trajectories) == ((), (), ())
        assert result.failed_tokens > 0
        assert runner.means.engine.running == 0


async def test_a_group_that_is_aborted_as_it_begins_samples_nothing(model_dir: Path) -> None:
    async with runner_of(model_dir, Rewards()) as runner:
        running = asyncio.create_task(runner.run(group(), lambda finished: None))
        await asyncio.sleep(0)  # it is known, and none of its responses has begun
        await runner.abort(KEY)
        result, _ = await running
        assert (result.trajectories, result.failed_tokens, runner.means.engine.sampled_tokens) == ((), 0, 0)


@pytest.mark.slow
async def test_a_prompt_that_is_too_long_fails_its_group_by_name(model_dir: Path) -> None:
    async with runner_of(model_dir, Rewards()) as runner:
        result, payload = await runner.run(
            group(n=3, item=ITEM | {"prompt": "1" * 65}), lambda finished: None
        )
    reason = "prompt sorting-7 has 65 tokens, rollout.max_prompt_tokens is 64"
    assert result.failures == (("prompt", reason),) * 3
    assert (result.trajectories, result.failed_tokens, payload.trajectories) == ((), 0, ())


@pytest.mark.slow
def test_a_chat_template_is_used_where_there_is_one(model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    assert render_prompts(tokenizer, [ITEM]) == [[tiny.VOCABULARY[character] for character in "4,1,9="]]
    tokenizer.chat_template = TEMPLATE
    assert render_prompts(tokenizer, [ITEM]) == [
        [tiny.VOCABULARY[character] for character in "<user>4,1,9=<assistant>"]
    ]


class Questions(Environment):
    """Asks `num_turns` times; the reward is how much was said."""

    def __init__(self, num_turns: int = 3) -> None:
        self.num_turns = num_turns
        self.said: list[str] = []

    async def start(self, item: dict[str, Any]) -> Turn:
        return Turn(messages=({"role": "user", "content": item["prompt"]},))

    async def step(self, answer: Answer) -> Turn | End:
        self.said.append(answer.text)
        if len(self.said) == self.num_turns:
            return End(reward=float(len("".join(self.said))))
        return Turn(
            messages=({"role": "user", "content": f"{len(self.said)}?"},),
            is_last=len(self.said) == self.num_turns - 1,
        )


@pytest.mark.slow
@pytest.mark.parametrize("template", [None, TEMPLATE], ids=["plain", "chat template"])
async def test_several_turns_are_one_sequence_whose_sampled_tokens_alone_are_trained(
    model: Qwen3ForCausalLM, model_dir: Path, template: str | None
) -> None:
    asked = [f"<user>{number}?<assistant>" if template else f"{number}?" for number in (1, 2)]

    finished: list[int] = []
    async with runner_of(model_dir, Rewards(), Questions, chat_template=template, sampling=LONG) as runner:
        result, payload = await runner.run(group(), finished.append)
    assert finished == [1, 2, 3, 4, 5, 6, 7, 8]
    ended = [failure for failure in result.failures if failure.kind == "cut"]
    assert len(result.trajectories) + len(ended) == 8
    assert result.trajectories, "no episode came to its end"
    for meta, trajectory in zip(result.trajectories, payload.trajectories, strict=True):
        (segment,) = trajectory.segments()
        text = "".join(
            tiny.VOCABULARY_INVERSE[token] for token in segment["tokens"][~segment["mask"]].tolist()
        )
        assert text.endswith("".join(asked))
        assert (segment["mask"] == (segment["versions"] == 0)).all()
        assert meta.response_tokens == segment["mask"].sum()
        assert meta.prompt_tokens == (~segment["mask"]).sum()
        expected = tiny.plain_logprobs(model, model.state_dict(), segment["tokens"].tolist(), 0.9)
        assert segment["logprobs"][1:].tolist() == pytest.approx(
            np.where(segment["mask"][1:], expected, 0.0), abs=1e-5
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "template", [TEMPLATE, "{{ messages[-1].content }}"], ids=["one segment", "a segment per turn"]
)
async def test_every_span_of_every_turn_has_the_logprobs_of_the_weights_that_sampled_it(
    model: Qwen3ForCausalLM, model_dir: Path, template: str
) -> None:
    """Weights are loaded with recompute-kv while some episodes sample and others are between turns."""
    weights = {version: tiny.weights_after(model, version) for version in (0, 1, 2)}

    how = Sampling(temperature=0.9, max_response_tokens=40)
    async with runner_of(model_dir, Rewards(), Questions, chat_template=template, sampling=how) as runner:
        engine = runner.means.engine
        running = asyncio.create_task(runner.run(group(n=12), lambda finished: None))
        for version, after_tokens in ((1, 150), (2, 400)):
            while engine.sampled_tokens < after_tokens:  # noqa: ASYNC110
                await asyncio.sleep(0)
            await engine.load(weights[version], version, "recompute-kv")
        result, payload = await running
    segments = [segment for trajectory in payload.trajectories for segment in trajectory.segments()]
    for segment in segments:
        for version in {*segment["versions"].tolist()} - {-1}:
            expected_T = np.array(
                [0.0, *tiny.plain_logprobs(model, weights[version], segment["tokens"].tolist(), 0.9)]
            )
            span_T = segment["versions"] == version
            assert segment["logprobs"][span_T].tolist() == pytest.approx(expected_T[span_T], abs=1e-4)
    assert len(result.trajectories) > 8
    assert max(meta.span for meta in result.trajectories) == 2
    assert {meta.num_forks for meta in result.trajectories} == ({0} if template == TEMPLATE else {2})


@pytest.mark.slow
@pytest.mark.parametrize(("turns", "most_requeues"), [(1, 0), (1, 5), (3, 1), (1, RESTART), (3, RESTART)])
async def test_what_several_versions_sampled_is_left_out_or_sampled_again(
    model: Qwen3ForCausalLM, model_dir: Path, turns: int, most_requeues: int
) -> None:
    """Two loads, some responses being sampled at each. Each try counts as one failure, with its tokens. With
    RESTART they are given up at the load."""
    weights = {version: tiny.weights_after(model, version) for version in (0, 1, 2)}
    how, freed = Sampling(temperature=0.9, max_response_tokens=40), list[int]()
    made = {"make_environment": Questions} if turns > 1 else {}
    async with runner_of(model_dir, Rewards(), sampling=how, most_requeues=most_requeues, **made) as runner:
        engine = runner.means.engine
        running = asyncio.create_task(runner.run(group(n=24), freed.append))
        for version, after_tokens in ((1, 150), (2, 300)):
            while engine.sampled_tokens < after_tokens:  # noqa: ASYNC110
                await asyncio.sleep(0)
            await engine.load(weights[version], version, "keep-kv")
            if most_requeues == RESTART:
                await runner.restart()
        result, payload = await running
        sampled = engine.sampled_tokens
    mixed = [failure for failure in result.failures if failure.kind == "mixed"]
    others = len(result.failures) - len(mixed)
    versions = [f"was sampled by the versions {some}" for some in ("0, 1", "1, 2", "0, 1, 2")]
    assert mixed[0].text.endswith((*versions, "new weights were loaded (rollout.interrupt)"))
    if most_requeues != RESTART or turns == 1:
        at_the_load = [failure for failure in mixed if "were loaded" in failure.text]
        assert at_the_load == (mixed if most_requeues == RESTART else [])
    assert result.trajectories
    assert not any(meta.span for meta in result.trajectories)
    if most_requeues in (5, RESTART):
        assert len(result.trajectories) == 24 - others, "after the second load nothing can be mixed"
    elif most_requeues == 0:
        assert len(result.trajectories) == 24 - len(result.failures)
    trained = sum(meta.response_tokens for meta in result.trajectories)
    in_flight = len(mixed) if most_requeues == RESTART else 0  # a token each, as the abort comes
    assert 0 <= sampled - trained - result.failed_tokens <= in_flight
    assert (freed[-1], max(freed)) == (24, 24)
    for meta, trajectory in zip(result.trajectories, payload.trajectories, strict=True):
        ((version, _),) = meta.version_tokens
        for segment in trajectory.segments():
            found = tiny.plain_logprobs(model, weights[version], segment["tokens"].tolist(), 0.9)
            expected_T, mask_T = np.array([0.0, *found]), segment["mask"]
            assert segment["logprobs"][mask_T].tolist() == pytest.approx(expected_T[mask_T], abs=1e-4)


class Broken(Questions):
    async def step(self, answer: Answer) -> Turn | End:
        raise KeyError("no such tool")


def test_a_reward_that_is_no_number_fails_and_such_a_fact_is_left_out() -> None:
    class Ending(SelfPlayed):
        async def play(self, episode: Episode) -> End:
            return end

    def played() -> Episode:
        means = Means(cast(Any, None), cast(Any, None), Ending, Limits(1, 1), Slots(1, hold=True))
        episode = Episode("e", {"uid": "u"}, 0, means, cast(Any, None))
        asyncio.run(episode.play())
        return episode

    for number in (math.nan, -math.inf, 1e308):
        end = End(reward=number)
        failed = played()
        assert failed.end is None
        assert failed.failure == ("reward", f"reward of e: it is {number:g}, not a number up to 1e+09")
    end = End(reward=1.0, facts={"a": 2.0, "b": math.inf, "c": 1e300})
    assert played().meta().facts == (("a", 2.0),)


async def test_an_environment_that_raises_fails_its_trajectories_with_its_error(model_dir: Path) -> None:
    async with runner_of(model_dir, Rewards(), Broken) as runner:
        result, _ = await runner.run(group(n=2), lambda finished: None)
    assert [failure.kind for failure in result.failures] == ["environment"] * 2
    assert result.failures[1].text == "environment of sorting-7@2.1/1: KeyError: 'no such tool'"
    assert result.failed_tokens > 0


@pytest.mark.slow
async def test_where_the_template_rewrites_earlier_turns_a_new_segment_begins(model_dir: Path) -> None:
    forgets = "{{ messages[-1].content }}"
    async with runner_of(model_dir, Rewards(), Questions, chat_template=forgets) as runner:
        result, payload = await runner.run(group(n=2), lambda finished: None)
    for meta, trajectory in zip(result.trajectories, payload.trajectories, strict=True):
        prompts = [
            "".join(tiny.VOCABULARY_INVERSE[token] for token in s["tokens"][~s["mask"]])
            for s in trajectory.segments()
        ]
        assert prompts == ["4,1,9=", "1?", "2?"]
        assert (meta.num_turns, meta.num_forks) == (3, 2)
        assert meta.response_tokens == sum(int(segment["mask"].sum()) for segment in trajectory.segments())
        assert meta.version_tokens == ((0, meta.response_tokens),)
    assert trained_of(payload) == sampled_of(payload)


@pytest.mark.slow
async def test_the_shown_text_of_an_eval_repeats_no_prompt_of_a_later_segment(model_dir: Path) -> None:
    forgets = "{{ messages[-1].content }}"
    async with runner_of(model_dir, Rewards(), Questions, chat_template=forgets) as runner:
        request = EvalRequest(version=0, tries=(EvalTry(ITEM, is_shown=True),), seed=3)
        result, (trajectory,) = await runner.evaluate(request, runner.sampling, with_tokens=True)
        *earlier, last = trajectory.segments()
        sampled = runner.means.chat.tokenizer.decode(last["tokens"][last["mask"]].tolist())
    assert len(earlier) == 2
    assert result.texts == {0: sampled}


def trained_of(payload: GroupPayload) -> Counter[tuple[int, int, float]]:
    """(trajectory, token, logprob) of every token in the trainer's microbatches. A trajectory's advantage is
    its number."""
    planned = tuple(
        PlannedTrajectory(group=0, trajectory=i, advantage=float(i)) for i in range(len(payload.trajectories))
    )
    share = OptimizerStepPlan(trajectories=planned, num_loss_tokens=0, num_trajectories=len(planned))
    plan = RankPlan(optimizer_steps=(share,), window=0)
    (batch,) = step_batches(plan, {0: payload}, max_tokens=100, ranks=OneRank())
    found = Counter[tuple[int, int, float]]()
    for b in batch.microbatches:
        found.update(zip(b.advantages_N.tolist(), b.targets_N.tolist(), b.logp_mu_N.tolist(), strict=True))
    return found


def sampled_of(payload: GroupPayload) -> Counter[tuple[int, int, float]]:
    return Counter(
        (index, token, logprob)
        for index, trajectory in enumerate(payload.trajectories)
        for segment in trajectory.segments()
        for token, logprob, is_sampled in zip(
            segment["tokens"], segment["logprobs"].tolist(), segment["mask"], strict=True
        )
        if is_sampled
    )


class Judged(Questions):
    """Whatever ends it, its reward is how many turns there were."""

    async def cut(self, reason: str) -> End:
        return End(
            reward=float(len(self.said)),
            turn_rewards=(1.0,) * len(self.said),
            facts={"asked": len(self.said)},
        )


@pytest.mark.slow
async def test_an_episode_that_is_cut_short_has_the_reward_of_what_it_reached(model_dir: Path) -> None:
    short = Sampling(temperature=0.9, max_response_tokens=4)
    async with runner_of(model_dir, Rewards(), partial(Judged, 9), sampling=short, max_turns=2) as runner:
        by_turns, payload = await runner.run(group(n=2), lambda finished: None)
    async with runner_of(
        model_dir, Rewards(), partial(Judged, 9), sampling=short, max_context_tokens=14
    ) as runner:
        by_length, whole = await runner.run(group(n=2), lambda finished: None)
    for meta in by_turns.trajectories:
        assert (meta.reward, meta.num_turns, meta.finish_reason, meta.facts) == (
            2.0,
            2,
            "max_turns",
            (("asked", 2),),
        )
    assert payload.trajectories[0].values["turn_rewards"] == [1.0, 1.0]
    assert {meta.finish_reason for meta in by_length.trajectories} == {"length"}
    assert all(len(next(trajectory.segments())["tokens"]) <= 14 for trajectory in whole.trajectories)
    assert all(next(trajectory.segments())["mask"][-1] for trajectory in whole.trajectories)


class Hangs(Questions):
    closed = 0

    async def step(self, answer: Answer) -> Turn | End:
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    async def close(self) -> None:
        Hangs.closed += 1


@pytest.mark.slow
async def test_an_episode_ends_at_its_time_limit_wherever_it_waits(model_dir: Path) -> None:
    """Its environment hangs, or (with a limit of no time) it has not begun to generate."""

    Hangs.closed = 0

    for limit_s in (0.3, 1e-9):
        waiting: dict[str, str] = {}
        async with runner_of(
            model_dir, Rewards(), Hangs, episode_timeout_s=limit_s, on_waiting=waiting.__setitem__
        ) as runner:
            result, _ = await runner.run(group(n=2), lambda finished: None)
        assert [failure.kind for failure in result.failures] == ["episode-timeout"] * 2
        assert f"env.episode_timeout_s = {limit_s:g}" in result.failures[0].text
        assert not any(waiting.values())
    assert Hangs.closed == 4


@pytest.mark.parametrize("hold", [True, False])
async def test_an_episode_at_a_tool_keeps_or_lends_its_slot_and_a_drain_waits_for_it(
    model_dir: Path, hold: bool
) -> None:
    tool, both_wait, free, waiting = asyncio.Event(), asyncio.Event(), list[int](), dict[str, str]()

    def on_waiting(episode: str, for_what: str) -> None:
        waiting[episode] = for_what
        if list(waiting.values()) == ["the environment"] * 2:
            both_wait.set()

    class Slow(Judged):
        async def step(self, answer: Answer) -> Turn | End:
            await tool.wait()
            return await super().step(answer)

    async with runner_of(model_dir, Rewards(), Slow, hold=hold, max_turns=2, on_waiting=on_waiting) as runner:
        running = asyncio.create_task(runner.run(group(n=2), free.append))
        await both_wait.wait()
        await asyncio.sleep(0)
        assert free == ([] if hold else [1, 2])
        drain = asyncio.create_task(drained(runner))
        await asyncio.sleep(0.05)
        assert not drain.done()
        tool.set()
        result, _ = await running
        await drain
    assert (free[-1], [meta.num_turns for meta in result.trajectories]) == (2, [2, 2])


async def drained(runner: GroupRunner) -> None:
    async with runner.means.slots.drained():
        pass


@pytest.mark.slow
async def test_an_eval_scores_each_item_once_beside_a_running_group(model_dir: Path) -> None:
    tries = tuple(
        EvalTry({"uid": f"e{i}", "prompt": "1" * (70 if i == 3 else 1 + i), "metadata": {}}, is_shown=i < 5)
        for i in range(20)
    )
    greedy = Sampling(temperature=0.0, max_response_tokens=16)
    request = EvalRequest(version=0, tries=tries, seed=1)
    async with runner_of(model_dir, Rewards()) as runner:
        running = asyncio.create_task(runner.run(group(), lambda finished: None))
        first, _ = await runner.evaluate(request, greedy)
        assert len((await running)[0].trajectories) == 8
        again, played = await runner.evaluate(request, greedy, with_tokens=True)
        tokenizer = runner.means.chat.tokenizer
        with pytest.raises(ValueError, match="eval of version 4 on an engine that holds 0"):
            await runner.evaluate(EvalRequest(version=4, tries=tries, seed=1), greedy)
    assert first == again
    assert [*first.texts] == [0, 1, 2, 4]  # the fourth has failed
    sampled = [one.per_token["tokens"][one.per_token["mask"]] for one in played]
    assert [*first.texts.values()] == [tokenizer.decode(sampled[number]) for number in range(4)]
    assert sum(isinstance(outcome, TrajectoryMeta) for outcome in first.outcomes) == 19
    assert first.outcomes[3] == TrajectoryFailure(
        "prompt", "prompt e3 has 70 tokens, rollout.max_prompt_tokens is 64"
    )


@pytest.mark.slow
async def test_an_eval_item_gets_the_same_answer_in_whatever_company(model_dir: Path) -> None:
    items = [{"uid": f"e{i}", "prompt": "4,1,9=", "metadata": {}} for i in range(3)]
    tries = tuple(EvalTry(item, sample=sample) for item in items for sample in range(2))
    async with runner_of(model_dir, Rewards()) as runner:
        together, played = await runner.evaluate(
            EvalRequest(version=0, tries=tries, seed=1), SAMPLING, with_tokens=True
        )
        parts = [
            await runner.evaluate(EvalRequest(version=0, tries=tries[a:b], seed=1), SAMPLING)
            for a, b in ((4, 6), (0, 4))
        ]
    # samples of an item differ, too
    assert len({outcome.response_tokens for outcome in together.outcomes}) > 3
    assert together.outcomes == parts[1][0].outcomes + parts[0][0].outcomes
    assert [one.num_sampled for one in played] == [one.response_tokens for one in together.outcomes]
    assert not any(trajectories for _, trajectories in parts)


@pytest.mark.slow
@pytest.mark.parametrize("hangs", [False, True], ids=["while it generates", "while rewards are awaited"])
async def test_aborted_evals_end_soon_and_leave_groups_alone(model_dir: Path, hangs: bool) -> None:
    rewards = Rewards(hangs=hangs)
    tries = tuple(EvalTry({"uid": f"e{i}", "prompt": "1", "metadata": {}}) for i in range(40))
    long = Sampling(temperature=0.9, max_response_tokens=128)
    async with runner_of(model_dir, rewards) as runner:
        evaluating = asyncio.create_task(runner.evaluate(EvalRequest(version=0, tries=tries, seed=1), long))
        while not rewards.texts:  # noqa: ASYNC110
            await asyncio.sleep(0)
        rewards.hangs = False
        beside = asyncio.create_task(runner.run(group(), lambda finished: None))
        await runner.abort(None)
        result, _ = await evaluating
        assert len((await beside)[0].trajectories) == 8
    assert len(result.outcomes) == 40
    assert {outcome.kind for outcome in result.outcomes if isinstance(outcome, TrajectoryFailure)} == {
        "aborted"
    }


@pytest.mark.slow
async def test_running_tokens_are_those_of_groups_that_have_not_ended(model_dir: Path) -> None:
    rewards = Rewards(hangs=True)
    tries = tuple(EvalTry({"uid": f"e{i}", "prompt": "1", "metadata": {}}) for i in range(3))
    async with runner_of(model_dir, rewards) as runner:
        evaluating = asyncio.create_task(
            runner.evaluate(EvalRequest(version=0, tries=tries, seed=1), SAMPLING)
        )
        while len(rewards.texts) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert runner.means.engine.sampled_tokens > runner.running_tokens == 0
        eval_tokens = runner.means.engine.sampled_tokens
        running = asyncio.create_task(runner.run(group(), lambda finished: None))
        while len(rewards.texts) < 11:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert runner.running_tokens == runner.means.engine.sampled_tokens - eval_tokens
        await runner.abort(KEY)
        assert (await running)[0].failed_tokens == runner.means.engine.sampled_tokens - eval_tokens
        assert runner.running_tokens == 0
        await runner.abort(None)
        await evaluating


@pytest.mark.slow
async def test_an_engine_that_fails_fails_the_group_with_its_own_error(model_dir: Path) -> None:
    async with runner_of(model_dir, Rewards()) as runner:
        running = asyncio.create_task(runner.run(group(), lambda finished: None))
        await asyncio.sleep(0)
        await runner.means.engine.close()
        with pytest.raises(ExecutorFailed, match="closed"):
            await running


@pytest.mark.slow
async def test_a_part_goes_on_in_another_engine_where_a_checkpoint_found_it(
    model_dir: Path, tmp_path: Path
) -> None:
    """Random numbers depend on seed and position alone, so with the same weights it is the part that would
    have been."""
    request = PartRequest(key=PartKey(KEY, 0), item=ITEM, indices=(0, 2), seed=7)
    async with runner_of(model_dir, Rewards(), sampling=LONG) as runner:
        assert runner.partial_responses() == (PartialResult(), [])
        brake = Brake(runner.means.engine, {0: 40})
        playing = asyncio.create_task(runner.run(request, lambda free: None))
        async with brake.stopped():
            told, (payload,) = runner.partial_responses()
        _, whole = await playing
    kept = told.responses[request.key]
    kept_tokens = sum(one.tokens for one in kept.values())
    assert list(kept) == [0, 2]
    assert told.rest_tokens == 0
    assert 40 <= kept_tokens < sum(len(s["tokens"]) for t in whole.trajectories for s in t.segments())
    write_payloads(
        tmp_path, joined_by_index({KEY: dict.fromkeys(kept, "so-far")}, {"so-far": payload.trajectories})
    )
    (read,) = read_payloads(tmp_path)
    again = replace(request, key=PartKey(KEY, 1), partial=kept)
    async with runner_of(model_dir, Rewards(), sampling=LONG) as runner:
        result, made = await runner.run(again, lambda free: None, read)
        assert runner.means.engine.sampled_tokens == result.response_tokens - kept_tokens
    for ours, theirs in zip(made.trajectories, whole.trajectories, strict=True):
        assert ours.values == theirs.values
        (segment,), (expected,) = ours.segments(), theirs.segments()
        for name in ("tokens", "versions", "mask"):
            np.testing.assert_array_equal(segment[name], expected[name])
        np.testing.assert_allclose(segment["logprobs"], expected["logprobs"], atol=1e-4)


@pytest.mark.slow
async def test_only_the_reward_of_a_whole_response_is_computed_again(model_dir: Path) -> None:
    request = PartRequest(key=PartKey(KEY, 0), item=ITEM, indices=(0, 1), seed=7)
    async with runner_of(model_dir, Rewards(hangs=True)) as runner:
        playing = asyncio.create_task(runner.run(request, lambda free: None))
        await until(
            lambda: (
                [
                    one.is_whole
                    for one in runner.partial_responses()[0].responses.get(request.key, {}).values()
                ]
                == [True, True]
            )
        )
        told, (payload,) = runner.partial_responses()
        playing.cancel()
    rewards = Rewards()
    async with runner_of(model_dir, rewards) as runner:
        result, _ = await runner.run(
            replace(request, partial=told.responses[request.key]), lambda free: None, payload
        )
        assert runner.means.engine.sampled_tokens == 0
    assert [meta.reward for meta in result.trajectories] == [float(len(text)) for text in rewards.texts]
    assert [meta.version_tokens for meta in result.trajectories] == [
        one.version_tokens for one in told.responses[request.key].values()
    ]


async def test_an_episode_with_several_turns_starts_again(model_dir: Path) -> None:
    async with runner_of(model_dir, Rewards(), partial(Questions, 3), chat_template=TEMPLATE) as runner:
        brake = Brake(runner.means.engine, {0: 4})
        playing = asyncio.create_task(
            runner.run(PartRequest(key=PartKey(KEY, 0), item=ITEM, indices=(0,), seed=1), lambda free: None)
        )
        async with brake.stopped():
            told, payloads = runner.partial_responses()
            assert (told.responses, payloads) == ({}, [])
            assert told.rest_tokens == runner.running_tokens == 4
        playing.cancel()
