"""gpu_smoke.py's check of the trainer: train steps on made-up groups, a gather, and the weights for the engine's checks."""

from __future__ import annotations

import argparse
import math
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from engine_kit import MB, PROMPT_TOKENS, RandomModel
from gpu_smoke_kit import DEVICE, RESPONSE_TOKENS, TRAIN_STEPS, Wrong

from asyncrl_cli.loop.attempts import AttemptKey, GroupResult, TrajectoryMeta
from asyncrl_cli.loop.values import Value
from asyncrl_cli.profile.schema import ModelSection, Place, Profile, TrainerSection
from asyncrl_cli.samples import GroupPayload, Segment, Trajectory
from asyncrl_cli.train.balance import plan_train_step
from asyncrl_cli.train.policy_trainer import PolicyTrainer
from asyncrl_cli.weights.buckets import Bucket
from asyncrl_cli.weights.versions import Manifest

GROUPS, GROUP_SIZE = 8, 8
LEARNING_RATE = 1e-3
"""Large enough that a worker on the old weights shows."""


def made_up_group(model: RandomModel, number: int) -> tuple[GroupResult, GroupPayload]:
    """Random tokens with the logprobs of a model that has learned nothing; rewards are by chance."""
    draw = random.Random(number)
    key = AttemptKey(f"prompt-{number}", 0, 0)
    trajectories, metas = [], []
    for _ in range(GROUP_SIZE):
        response_tokens = draw.randint(RESPONSE_TOKENS // 4, RESPONSE_TOKENS)
        length = PROMPT_TOKENS + response_tokens
        sampled = np.arange(length) >= PROMPT_TOKENS
        segment = Segment(
            tokens_T=np.array([draw.randrange(model.vocab_size) for _ in range(length)], dtype=np.int32),
            logprobs_T=np.where(sampled, -math.log(model.vocab_size), 0.0).astype(np.float32),
            versions_T=np.where(sampled, 0, -1).astype(np.int32),
            mask_T=sampled,
        )
        reward = float(draw.random() < 0.5)
        trajectories.append(Trajectory(segments=(segment,), reward=reward, finish_reason="stop"))
        metas.append(
            TrajectoryMeta(
                prompt_tokens=PROMPT_TOKENS,
                response_tokens=response_tokens,
                reward=reward,
                finish_reason="stop",
                version_tokens=((0, response_tokens),),
            )
        )
    result = GroupResult(key=key, trajectories=tuple(metas), failures=(), failed_tokens=0, payload=None)
    return result, GroupPayload(uid=key.uid, epoch=0, attempt=0, trajectories=tuple(trajectories))


def batch_of(model: RandomModel, step: int) -> dict[str, Any]:
    groups = [made_up_group(model, step * GROUPS + index) for index in range(GROUPS)]
    (plan,) = plan_train_step([result for result, _ in groups], Profile(), ranks=1, step=1, window=0)
    return dict(step_in_window=0, plan=plan, payloads=dict(enumerate(payload for _, payload in groups)))


@contextmanager
def trained(model: RandomModel) -> Iterator[tuple[Manifest, list[Bucket], str]]:
    """The published weights after some train steps, and what is to be said of them."""
    profile = Profile(model=ModelSection(dtype="bfloat16"), trainer=TrainerSection(lr=LEARNING_RATE))
    place = Place(model_dir=str(model.directory), device=DEVICE)
    with tempfile.TemporaryDirectory() as directory:
        trainer = PolicyTrainer(profile, place, rank=0, init_method=f"file://{directory}/meet", total_optimizer_steps=1)
        try:
            before = {name: local.clone() for name, local in trainer.model.locals().items()}
            reports = [trainer.train(**batch_of(model, step)) for step in range(1, TRAIN_STEPS + 1)]
            gather_s = trainer.gather(1)
            manifest, buckets = trainer.published(1)
            _check_trained(trainer, before, [report.metrics for report in reports])
            rate = reports[-1].tokens / reports[-1].train_s
            peak = torch.cuda.max_memory_allocated() / MB
            yield manifest, buckets, f"{rate:,.0f} tokens/s, gather {1e3 * gather_s:.0f} ms, peak {peak:,.0f} MiB"
        finally:
            trainer.close()
    del trainer
    torch.cuda.empty_cache()


def _check_trained(trainer: PolicyTrainer, before: dict[str, torch.Tensor], metrics: list[dict[str, Value]]) -> None:
    odd = sorted({name for step in metrics for name, value in step.items() if not math.isfinite(value.value)})
    if odd:
        raise Wrong(f"not finite: {', '.join(odd)}")
    after = trainer.model.locals()
    if not all(bool(tensor.isfinite().all()) for tensor in after.values()):
        raise Wrong("weights are not finite")
    same = [name for name, tensor in after.items() if torch.equal(tensor, before[name])]
    if same:
        raise Wrong(f"{len(same)} of {len(after)} parameters were not trained, {same[0]} among them")


def check_trainer(model: RandomModel, _: argparse.Namespace) -> str:
    with trained(model) as (_manifest, buckets, detail):
        return f"{detail}, {sum(len(bucket.data) for bucket in buckets) / MB:,.0f} MiB in {len(buckets)} bucket(s)"
