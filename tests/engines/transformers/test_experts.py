"""A mixture of experts from the trainer to both engines: transformers joins a layer's experts in memory,
files and vLLM do not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel

from asyncrl_cli.base.errors import ExecutorFailed
from asyncrl_cli.weights.buckets import Bucket
from asyncrl_cli.weights.receivers import SharedWeights
from asyncrl_cli.weights.senders import keep_version
from asyncrl_cli.weights.versions import Manifest
from tests.engines import tiny
from tests.engines.made import sampling, transformers_engine
from tests.engines.needs import needs_vllm
from tests.engines.transformers.test_attention_features import make_model, mean_diff, own_logprobs, sequences
from tests.engines.vllm.vllm_world import MAX_RESPONSE_TOKENS, World, world
from tests.train.train_samples import make_step
from tests.trainers import planned, trainer_parts

LOAD_BUCKET_BYTES = 10_000


@dataclass(frozen=True)
class Published:
    """Version 1 of a tiny Qwen3-MoE: after one train step."""

    model_dir: Path
    trained: PreTrainedModel
    manifest: Manifest
    buckets: list[Bucket]
    logprobs: list[list[float]]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Published]:
    place = tmp_path_factory.mktemp("experts")
    model = make_model("experts: qwen3-moe")
    model_dir = tiny.save(model, place / "model")
    settings = trainer_parts(model_dir, lr=3e-2, gather_bucket_size_mb=0.1)
    trainer = settings.made(f"file://{place}/rendezvous")
    try:
        metas, payloads = make_step(1, num_groups=2)
        (plan,) = planned(metas)
        trainer.train(step_in_window=0, plan=plan, payloads=dict(enumerate(payloads)))
        trainer.gather(1)
        manifest, buckets = trainer.published(1)
        model.load_state_dict(trainer.model.locals())
        yield Published(model_dir, model, manifest, buckets, trainer.model.logprobs(sequences()))
    finally:
        trainer.close()


def names_in(directory: Path) -> set[str]:
    names: set[str] = set()
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names |= set(file.keys())
    return names


def test_training_has_changed_what_an_engine_computes(published):
    before = AutoModelForCausalLM.from_pretrained(published.model_dir, attn_implementation="eager")
    for tokens, logprobs in zip(sequences(), published.logprobs, strict=True):
        assert mean_diff(logprobs, own_logprobs(published.trained, tokens)) < 1e-5
        assert mean_diff(logprobs, own_logprobs(before, tokens)) > 0.05


def test_kept_versions_are_files_as_save_pretrained_writes_them(published, tmp_path):
    keep_version(tmp_path / "versions", published.manifest, published.buckets, published.model_dir, 1)
    directory = tmp_path / "versions" / "version-000001"
    assert names_in(directory) == names_in(published.model_dir)
    assert "model.layers.0.mlp.experts.3.gate_proj.weight" in names_in(directory)
    again = AutoModelForCausalLM.from_pretrained(directory)
    for name, parameter in published.trained.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter), name


@pytest.mark.slow
@pytest.mark.parametrize("dual_buffer", [True, False])
async def test_the_embedded_engine_loads_a_published_version(published, dual_buffer):
    async with transformers_engine(published.model_dir, slots=4, max_response_tokens=24) as engine:
        if dual_buffer:
            await engine.load(SharedWeights(published.buckets), 1, "drain")
        else:
            await engine.load_in_place(lambda: published.buckets, 1, "drain")
        completion = await engine.generate("r", sequences()[0], sampling(24), 0)
        scores = await engine.score(sequences(), 1.0)
    for ours, trainers in zip(scores.logprobs, published.logprobs, strict=True):
        assert mean_diff(ours, trainers) < 1e-5
    expected = own_logprobs(published.trained, sequences()[0] + completion.tokens)[len(sequences()[0]) - 1 :]
    assert mean_diff(completion.logprobs, expected) < 1e-5


@pytest.mark.slow
@needs_vllm
@pytest.mark.filterwarnings("default")  # vLLM's imports warn
@pytest.mark.timeout(600)
def test_vllm_loads_a_published_version_and_closing_it_fails_what_still_runs_and_what_comes_later(published):
    with world(published.trained, published.model_dir) as there:

        async def loaded() -> tuple[list[list[float]], list[list[float]]]:
            before = await there.engine.score(sequences(), 1.0)
            weights = SharedWeights(published.buckets)
            await there.engine.load(weights, 1, "keep-kv")
            return before.logprobs, (await there.engine.score(sequences(), 1.0)).logprobs

        before, after = there.run(loaded)
        there.run(lambda: close_and_expect(there))
    for old, new, trainers in zip(before, after, published.logprobs, strict=True):
        assert mean_diff(old, trainers) > 0.05
        assert mean_diff(new, trainers) < 1e-4


async def close_and_expect(there: World) -> None:
    running = asyncio.create_task(there.generate([5, 6, 7], sampling(MAX_RESPONSE_TOKENS, temperature=0.1)))
    await there.sampled(5)
    await there.engine.close()
    with pytest.raises(ExecutorFailed, match="closed"):
        await running
    with pytest.raises(ExecutorFailed, match="closed"):
        await there.generate([5], sampling())
