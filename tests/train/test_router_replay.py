"""Routing replay: the engine's experts are a plain forward pass's, and the trainer's logprobs and gradients
are those of a model that is made to use given experts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from asyncrl_cli.audit.weights import Segment, _differences, _opened
from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.contracts.prompt_group import AttemptKey, GroupResult
from asyncrl_cli.data.sample_fields import BUILT_IN, ROUTED_EXPERTS
from asyncrl_cli.data.trajectories import GroupPayload, segment_of, trajectory_of
from asyncrl_cli.engines.port import Completion
from asyncrl_cli.engines.transformers.transformers_engine import TransformersEngine
from asyncrl_cli.envs.chat import Chat
from asyncrl_cli.envs.conversation import Context, Conversation
from asyncrl_cli.models.experts import Routing
from asyncrl_cli.weights.receivers import SharedWeights
from tests.engines import tiny
from tests.engines.made import made_for, prompts, sampling
from tests.packed import pack
from tests.train.train_samples import meta_of
from tests.trainers import rank_batch, trainer_parts

pytestmark = pytest.mark.slow
LAYERS, EXPERTS, TOP_K = 3, 16, 4


def make_model(seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, head_dim=16)
    sizes |= dict(num_attention_heads=4, num_key_value_heads=2, moe_intermediate_size=48)
    sizes |= changes
    tokens = dict(bos_token_id=None, eos_token_id=tiny.EOS, pad_token_id=0)
    config = Qwen3MoeConfig(
        **sizes, **tokens, num_experts=EXPERTS, num_experts_per_tok=TOP_K, norm_topk_prob=True
    )
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.mul_(4.0 if parameter.ndim == 3 else 2.5)  # experts differ clearly
    return model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(make_model(), tmp_path_factory.mktemp("experts"))


def replaying(profile: Any) -> Any:
    return profile.model_copy(update={"trainer": profile.trainer.model_copy(update={"router_replay": True})})


async def generated(
    model_dir: Path, requests: list[list[int]], *, dtype: str = "float32", tokens: int = 24, load: Any = None
) -> list[Completion]:
    """By a real engine; `load`: weights that come in the middle, with a new cache."""
    profile, place = made_for(model_dir, slots=8, max_prompt_tokens=64, max_response_tokens=128, dtype=dtype)
    engine = TransformersEngine(replaying(profile), place)
    try:
        await engine.start()
        running = [
            asyncio.create_task(engine.generate(f"{i}", one, sampling(tokens), i))
            for i, one in enumerate(requests)
        ]
        if load is not None:
            while engine.sampled_tokens < 4 * len(requests):  # noqa: ASYNC110  (it is counted in a thread)
                await asyncio.sleep(0)
            files = engine._form.to_files(load)
            await engine.load(SharedWeights(pack(files, 300_000)), 1, "recompute-kv")
        return [await one for one in running]
    finally:
        await engine.close()


def conversation_of(prompt: list[int], completion: Completion) -> Any:
    """As a segment, through the code that joins an episode's turns."""
    conversation = Conversation(Chat.__new__(Chat))
    conversation.keep(Context(), prompt, completion, [])
    (segment,) = conversation.segments()
    return segment


def payload_of(segments: list[Any]) -> tuple[GroupResult, GroupPayload]:
    trajectories = tuple(
        trajectory_of([one], BUILT_IN, reward=float(i % 2), finish_reason="stop")
        for i, one in enumerate(segments)
    )
    key = AttemptKey("p", 0, 0)
    facts = tuple(map(meta_of, trajectories))
    meta = GroupResult(key=key, trajectories=facts, failures=(), failed_tokens=0, payload=None)
    return meta, GroupPayload(uid="p", epoch=0, attempt=0, trajectories=trajectories)


class Given:
    """A plain model whose routers are told their experts (T, L, K), as its authors' formula has it."""

    def __init__(self, model: Any) -> None:
        self.model, self.chosen = model, torch.zeros(0)
        self.seen: list[torch.Tensor] = []
        for layer, router in enumerate(m for m in model.modules() if isinstance(m, Qwen3MoeTopKRouter)):
            router.forward = lambda hidden, router=router, layer=layer: self.route(router, layer, hidden)

    def route(self, router: Any, layer: int, hidden: torch.Tensor) -> Any:
        logits = torch.nn.functional.linear(hidden, router.weight)
        probabilities = logits.float().softmax(-1)
        experts = (
            self.chosen[:, layer]
            if len(self.chosen)
            else probabilities.argsort(-1, descending=True)[:, :TOP_K]
        )
        self.seen.append(experts)
        picked = probabilities[torch.arange(len(experts))[:, None], experts]
        if router.norm_topk_prob:
            picked = picked / picked.sum(-1, keepdim=True)
        return logits, picked.to(logits.dtype), experts

    def logprobs(self, segment: Any, experts: Any = None) -> torch.Tensor:
        tokens = torch.tensor(segment["tokens"], dtype=torch.int64)
        self.chosen = torch.zeros(0) if experts is None else torch.tensor(experts[:-1], dtype=torch.int64)
        self.seen = []
        logits = self.model(tokens[None, :-1]).logits[0].float()
        found = logits.log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        return found[torch.tensor(segment["mask"][1:])]


def by_layer(segment: Any) -> np.ndarray:
    return segment[ROUTED_EXPERTS].reshape(-1, LAYERS, TOP_K)


def test_the_engines_experts_are_those_of_a_plain_forward_pass(model_dir):
    """Of prompts, too, which responses share in the cache; all but the last token, which was no input."""
    requests = [one for one in prompts(2) for _ in range(4)]
    completions = asyncio.run(generated(model_dir, requests))
    plain = Given(make_model())
    for prompt, completion in zip(requests, completions, strict=True):
        segment = conversation_of(prompt, completion)
        with torch.no_grad():
            plain.logprobs(segment)
        expected = torch.stack(plain.seen, dim=1).sort(-1).values
        found = np.sort(by_layer(segment), -1)
        np.testing.assert_array_equal(found[:-1], expected)
        assert (found[-1] == -1).all()


def test_tokens_keep_the_experts_of_the_pass_that_sampled_from_them(model_dir):
    """A load in the middle: what the old weights chose stays, though the new ones compute its keys again."""
    other = make_model(seed=5)
    requests = prompts(4)
    completions = asyncio.run(generated(model_dir, requests, tokens=60, load=other.state_dict()))
    first, second = Given(make_model()), Given(other)
    crossed = 0
    for prompt, completion in zip(requests, completions, strict=True):
        segment, old = conversation_of(prompt, completion), completion.versions.count(0)
        crossed += 0 < old < len(completion.tokens)
        with torch.no_grad():
            first.logprobs(segment)
            second.logprobs(segment)
        by_first, by_second = (torch.stack(one.seen, 1).sort(-1).values.numpy() for one in (first, second))
        # The pass that samples the first token of a version has the token before it as its input.
        boundary = len(prompt) + old - 1 if old else 0
        found = np.sort(by_layer(segment), -1)[:-1]
        np.testing.assert_array_equal(found[:boundary], by_first[:boundary])
        np.testing.assert_array_equal(found[boundary:], by_second[boundary:])
    assert crossed


@pytest.mark.parametrize(
    "keys", [{}, {"shared_prefixes": False, "activation_checkpointing": "full"}, {"rank": 4}]
)
def test_a_trainer_computes_with_the_experts_that_it_is_given(model_dir, make_trainer, keys):
    """Any experts, drawn at random; two responses share a prompt with experts of its first one."""
    rng = np.random.default_rng(0)
    prompt, segments = rng.integers(2, 64, 12), []
    told = rng.permuted(np.tile(np.arange(EXPERTS), (12, LAYERS, 1)), axis=-1)[..., :TOP_K]
    for length in (9, 14, 6):
        tokens = [*prompt.tolist(), *rng.integers(2, 64, length).tolist()]
        segment = dict(segment_of(tokens, [0.0] * len(tokens), [-1] * 12 + [0] * length))
        own = rng.permuted(np.tile(np.arange(EXPERTS), (length, LAYERS, 1)), axis=-1)[..., :TOP_K]
        segment[ROUTED_EXPERTS] = np.concatenate([told, own]).reshape(len(tokens), -1).astype(np.int16)
        segments.append(segment)
    meta, payload = payload_of(segments)
    trainer = make_trainer(trainer_parts(model_dir, router_replay=True, **keys))
    plain = Given(make_model().requires_grad_())
    expected = torch.cat([plain.logprobs(one, by_layer(one)) for one in segments])
    (ours,) = trainer.model.column({0: payload}).values()
    np.testing.assert_allclose(np.concatenate(ours), expected.detach(), atol=1e-5)
    with torch.no_grad():
        free = torch.cat([plain.logprobs(one) for one in segments])
    assert np.abs(np.concatenate(ours) - free.numpy()).max() > 0.05
    if "rank" in keys:
        return
    weights = torch.linspace(-1, 2, len(expected))
    (expected * weights).sum().backward()
    trainer.model.gathered.before_backward(is_last=True)
    (batch,) = trainer.model.step_batches(rank_batch([meta], [payload])["plan"], {0: payload})
    (microbatch,) = batch.microbatches
    (trainer.model.scored(microbatch).logprobs_N * weights[microbatch.order_N]).sum().backward()
    routers = 0
    for name, parameter in plain.model.named_parameters():
        gradient = trainer.model.parameters[name].grad.full_tensor()
        torch.testing.assert_close(gradient, parameter.grad, atol=2e-5, rtol=1e-4, msg=name)
        routers += "gate.weight" in name and bool(parameter.grad.abs().sum() > 0)
    assert routers == LAYERS


def test_where_nothing_was_recorded_the_router_chooses(model_dir, make_trainer):
    rng = np.random.default_rng(1)
    tokens = rng.integers(2, 64, 20).tolist()
    segment = dict(segment_of(tokens, [0.0] * 20, [-1] * 5 + [0] * 15))
    unknown = {**segment, ROUTED_EXPERTS: np.full((20, LAYERS * TOP_K), -1, np.int16)}
    trainer = make_trainer(trainer_parts(model_dir, router_replay=True))
    columns = [trainer.model.column({0: payload_of([one])[1]})[0][0] for one in (segment, unknown)]
    np.testing.assert_array_equal(*columns)


def test_the_reference_and_dense_models_take_no_experts(model_dir, make_trainer, tmp_path):
    trainer = make_trainer(trainer_parts(model_dir, ref_dir=model_dir, use_kl_loss=True, router_replay=True))
    assert trainer.model._forward.routing is not None
    assert trainer.reference._forward.routing is None
    with pytest.raises(ConfigError, match="a qwen3 model has no experts whose choice could be replayed"):
        Routing(tiny.make_model())


def test_a_response_that_newer_weights_continue_keeps_the_experts_of_its_first_tokens(model_dir):
    other, prompt = make_model(seed=5), prompts(1)[0]

    async def continued() -> tuple[Completion, Completion]:
        profile, place = made_for(model_dir, slots=8, max_prompt_tokens=64, max_response_tokens=128)
        engine = TransformersEngine(replaying(profile), place)
        try:
            await engine.start()
            for seed in range(20):
                begun = await engine.generate("a", prompt, sampling(9), seed)
                if begun.finish_reason == "length":
                    break
            files = engine._form.to_files(other.state_dict())
            await engine.load(SharedWeights(pack(files, 300_000)), 1, "drain")
            begun = replace(begun, finish_reason="abort")
            return begun, await engine.generate("b", prompt, sampling(24), 3, so_far=begun)
        finally:
            await engine.close()

    begun, whole = asyncio.run(continued())
    first, segment = conversation_of(prompt, begun), conversation_of(prompt, whole)
    plain = Given(other)
    with torch.no_grad():
        plain.logprobs(segment)
    newer = torch.stack(plain.seen, dim=1).sort(-1).values.numpy()
    found, kept = np.sort(by_layer(segment), -1)[:-1], np.sort(by_layer(first), -1)[:-1]
    begin = len(prompt)
    np.testing.assert_array_equal(found[:begin], newer[:begin])
    np.testing.assert_array_equal(found[begin : begin + 8], kept[begin:])
    np.testing.assert_array_equal(found[begin + 8 :], newer[begin + 8 :])
    assert (kept[begin:] != newer[begin : begin + 8]).any()


def test_in_bfloat16_replayed_logprobs_are_nearer_to_the_sampled_ones(model_dir, make_trainer):
    requests = [one for one in prompts(8) for _ in range(2)]
    completions = asyncio.run(generated(model_dir, requests, dtype="bfloat16", tokens=100))
    segments = [conversation_of(*pair) for pair in zip(requests, completions, strict=True)]
    sampled = np.concatenate([one["logprobs"][one["mask"]] for one in segments])
    trainer = make_trainer(trainer_parts(model_dir, dtype="bfloat16", router_replay=True))
    routing, chosen, ours, free = trainer.model._forward.routing, [], [], []
    routing.recorded = {}
    for one in segments:
        alone = {name: array for name, array in one.items() if name != ROUTED_EXPERTS}
        for segment, arrays in ((one, ours), (alone, free)):  # the same rows by the same kernels
            ((array,),) = trainer.model.column({0: payload_of([segment])[1]}).values()
            arrays.append(array)
        chosen.append(torch.stack([routing.recorded[layer] for layer in range(LAYERS)], 1).sort(-1).values)
    replayed, without = (np.abs(np.concatenate(arrays) - sampled) for arrays in (ours, free))
    theirs = np.concatenate([np.sort(by_layer(one), -1)[:-1] for one in segments])
    differ = (torch.cat(chosen).numpy() != theirs).any(-1)
    print(f"\nbfloat16: {differ.mean():.4f} of choices and {differ.any(-1).mean():.4f} of tokens differ;")
    print(f"|logprob difference| mean {replayed.mean():.4f} with, {without.mean():.4f} without;")
    print(f"largest {replayed.max():.3f} with, {without.max():.3f} without; {len(sampled)} tokens")
    assert differ.any()
    assert replayed.mean() < without.mean()


def test_the_audit_computes_logprobs_with_the_recorded_experts(model_dir):
    rng = np.random.default_rng(0)
    tokens, mask = rng.integers(3, 60, 24), np.arange(24) >= 8
    experts = np.stack([[rng.permutation(EXPERTS)[:TOP_K] for _ in range(LAYERS)] for _ in tokens])
    with torch.no_grad():
        expected = Given(make_model()).logprobs({"tokens": tokens, "mask": mask}, experts).numpy()
    sampled = np.flatnonzero(mask)
    recorded = experts.reshape(len(tokens), -1).astype(np.int16)
    segment = Segment(tokens, sampled, np.zeros(len(sampled), int), expected, None, recorded)
    opened = lru_cache(partial(_opened, section={"dtype": "float32"}, replays=True))
    assert max(_differences(opened, {0: model_dir}, segment, 1.0)) < 1e-4
    of_the_router = segment._replace(experts_TW=np.full_like(recorded, -1))
    assert max(_differences(opened, {0: model_dir}, of_the_router, 1.0)) > 0.1
