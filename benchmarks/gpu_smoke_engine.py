"""gpu_smoke.py's check of an engine: weights in flight. With the transformers engine; gpu_smoke_vllm.py has
vLLM's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import transformers
from engine_kit import RandomModel, generate_all, prompts_of
from gpu_smoke_kit import PROMPT_TOKENS, Figures, Machine, Skipped, Step, Wrong, trainer_on

from asyncrl_cli.engines.port import Completion, Sampling
from asyncrl_cli.profile.schema import Profile, RolloutSection
from asyncrl_cli.weights.receivers import SharedWeights
from asyncrl_cli.weights.versions import Manifest, mean_abs_diff

if TYPE_CHECKING:
    from asyncrl_cli.engines.port import Engine
    from asyncrl_cli.engines.transformers.transformers_engine import TransformersEngine
    from asyncrl_cli.train.policy_trainer import PolicyTrainer

NEEDED_TRANSFORMERS = (5, 19)
MAX_LOGPROB_DIFF = {"float32": 1e-3, "bfloat16": 0.05}
"""Of mean logprobs: in bfloat16 trainer and engine both round, in different kernels."""


def need_batching() -> None:
    """Raises Skipped if transformers' continuous batching is not the one that the engine is written for."""
    found = transformers.__version__
    if tuple(map(int, found.split(".")[:2])) < NEEDED_TRANSFORMERS:
        raise Skipped(
            f"the engine needs continuous batching of transformers 5.19, not {found} "
            "(benchmarks/gpu_wheels.py)"
        )


def check_engine(machine: Machine, figures: Figures) -> None:
    """The transformers engine generates while a trained version is loaded; then its logprobs are the
    trainer's."""
    need_batching()
    asyncio.run(_check_engine(machine, figures))


async def _check_engine(machine: Machine, figures: Figures) -> None:
    from asyncrl_cli.engines.transformers.transformers_engine import TransformersEngine

    model = machine.main
    profile = machine.profile(rollout=rollout_section(slots=16 if machine.is_gpu else 4, response_tokens=96))
    with trainer_on(machine, model, profile) as trainer:
        manifest, buckets = trained(trainer, model, profile)
        engine = TransformersEngine(profile, machine.place(model))
        try:
            await engine.start()
            await _measure(engine, model, profile, figures)
            completions = await load_in_flight(
                engine,
                model,
                manifest,
                lambda: SharedWeights(buckets),
                profile,
                figures,
                slots=profile.rollout.slots,
            )
        finally:
            await engine.close()
        _compare_responses(trainer, prompts_of(model, len(completions)), completions, profile, figures)


async def _measure(
    engine: TransformersEngine, model: RandomModel, profile: Profile, figures: Figures
) -> None:
    """Tokens per second with all slots busy, and milliseconds per forward pass."""
    prompts = prompts_of(model, profile.rollout.slots, seed="measured")
    await generate_all(engine, prompts, 8, name="warm-up")
    before = engine.decode_steps
    taken_s, completions = await generate_all(
        engine, prompts, profile.rollout.max_response_tokens, name="measured"
    )
    figures["tokens_per_s"] = sum(len(completion.tokens) for completion in completions) / taken_s
    figures["forward_ms"] = 1e3 * taken_s / (engine.decode_steps - before)


def rollout_section(*, slots: int, response_tokens: int, **keys: Any) -> RolloutSection:
    return RolloutSection(
        slots=slots, max_prompt_tokens=PROMPT_TOKENS, max_response_tokens=response_tokens, **keys
    )


def trained(trainer: PolicyTrainer, model: RandomModel, profile: Profile) -> tuple[Manifest, list[Any]]:
    """Version 1: the weights after two train steps, each of which must change every parameter."""
    before = {name: local.clone() for name, local in trainer.model.locals().items()}
    for number in (1, 2):
        trainer.train(**Step(model, number=number).arguments(profile))
    same = [name for name, tensor in trainer.model.locals().items() if torch.equal(tensor, before[name])]
    if same:
        raise Wrong(f"{len(same)} of {len(before)} parameters were not trained, {same[0]} among them")
    trainer.gather(1)
    return trainer.published(1)


async def load_in_flight(
    engine: Engine,
    model: RandomModel,
    manifest: Manifest,
    receive: Callable[[], Mapping[str, torch.Tensor]],
    profile: Profile,
    figures: Figures,
    *,
    slots: int,
) -> list[Completion]:
    """The version is loaded while all slots generate; then the engine's logprobs of the probes must be the
    trainer's."""
    before = await _difference(engine, manifest)
    response_tokens = profile.rollout.max_response_tokens
    sampling, begun = Sampling(temperature=1.0, max_response_tokens=response_tokens), engine.sampled_tokens
    async with asyncio.TaskGroup() as tasks:
        running = [
            tasks.create_task(engine.generate(f"running-{row}", prompt, sampling, row))
            for row, prompt in enumerate(prompts_of(model, slots))
        ]
        while engine.sampled_tokens < begun + slots * response_tokens // 4:  # noqa: ASYNC110  (counted where the tokens come in)
            await asyncio.sleep(0.001)
        weights = await asyncio.to_thread(receive)
        report = await engine.load(weights, manifest.version, "recompute-kv")
    completions = [task.result() for task in running]
    after = await _difference(engine, manifest)
    versions = sorted({version for completion in completions for version in completion.versions})
    figures |= {
        "pause_s": report.pause_s,
        "load_s": report.load_s,
        "probes_before": before,
        "probes_after": after,
    }
    figures["versions"] = versions
    if versions != [0, manifest.version] or any(a > b for c in completions for a, b in pairwise(c.versions)):
        raise Wrong(f"tokens have the versions {versions}, and in each response they must not fall")
    if not (after <= MAX_LOGPROB_DIFF[profile.model.dtype] and before >= 2 * after):
        raise Wrong(
            f"logprobs differ from the trainer's by {after:.4f} after the load, by {before:.4f} before"
        )
    return completions


async def _difference(engine: Engine, manifest: Manifest) -> float:
    scores = await engine.score([list(tokens) for tokens in manifest.probe_tokens], manifest.temperature)
    return mean_abs_diff(scores.logprobs, manifest.probe_logprobs)


def _compare_responses(
    trainer: PolicyTrainer,
    prompts: list[list[int]],
    completions: list[Completion],
    profile: Profile,
    figures: Figures,
) -> None:
    """The trainer's logprobs of the tokens that the new weights sampled, with a cache that they rebuilt."""
    whole = [[*prompt, *completion.tokens] for prompt, completion in zip(prompts, completions, strict=True)]
    scores = trainer.model.logprobs(whole)
    ours, theirs = [], []
    for prompt, completion, score in zip(prompts, completions, scores, strict=True):
        new = [index for index, version in enumerate(completion.versions) if version == 1]
        ours.append([score[len(prompt) - 1 + index] for index in new])
        theirs.append([completion.logprobs[index] for index in new])
    figures["sampled_diff"] = mean_abs_diff(theirs, ours)
    if not figures["sampled_diff"] <= MAX_LOGPROB_DIFF[profile.model.dtype]:
        raise Wrong(f"sampled tokens' logprobs differ from the trainer's by {figures['sampled_diff']:.4f}")
