"""Made-up groups and a tiny random model for the trainer's tests, the same in every process."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np

from asyncrl_cli.contracts.prompt_group import AttemptKey, GroupResult, TrajectoryMeta
from asyncrl_cli.data.sample_fields import BUILT_IN
from asyncrl_cli.data.trajectories import Arrays, GroupPayload, Trajectory, trajectory_of

VOCAB_SIZE = 64


def save_tiny_model(directory: Path, *, tied: bool = False, seed: int = 0) -> Path:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    sizes = dict(vocab_size=VOCAB_SIZE, hidden_size=128, intermediate_size=384, num_hidden_layers=3)
    sizes |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=512)
    config = Qwen3Config(**sizes, tie_word_embeddings=tied)
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def make_segment(rng: random.Random, prompt_tokens: int, response_tokens: int, versions: list[int]) -> Arrays:
    length = prompt_tokens + response_tokens
    sampled = [i >= prompt_tokens for i in range(length)]
    # Near the logprobs of an untrained model, so that ratios spread around 1 on both sides of the clip.
    logprobs = [rng.gauss(-math.log(VOCAB_SIZE), 0.3) if s else 0.0 for s in sampled]
    return dict(
        tokens=np.array([rng.randrange(VOCAB_SIZE) for _ in range(length)], dtype=np.int32),
        logprobs=np.array(logprobs, dtype=np.float32),
        versions=np.array([rng.choice(versions) if s else -1 for s in sampled], dtype=np.int32),
        mask=np.array(sampled, dtype=np.bool_),
    )


def make_group(
    rng: random.Random, index: int, n: int, max_response_tokens: int = 40
) -> tuple[GroupResult, GroupPayload]:
    prompt_tokens = rng.randint(5, 20)
    trajectories, metas = [], []
    for _ in range(n):
        segment = make_segment(rng, prompt_tokens, rng.randint(3, max_response_tokens), [0])
        reward = float(rng.random() < 0.5)
        trajectories.append(trajectory_of((segment,), BUILT_IN, reward=reward, finish_reason="stop"))
        metas.append(meta_of(trajectories[-1]))
    key = AttemptKey(f"prompt-{index}", 0, 0)
    meta = GroupResult(key=key, trajectories=tuple(metas), failures=(), failed_tokens=0, payload=None)
    return meta, GroupPayload(uid=key.uid, epoch=0, attempt=0, trajectories=tuple(trajectories))


def meta_of(trajectory: Trajectory) -> TrajectoryMeta:
    num_tokens = sum(len(segment["tokens"]) for segment in trajectory.segments())
    num_sampled = sum(int(segment["mask"].sum()) for segment in trajectory.segments())
    return TrajectoryMeta(
        prompt_tokens=num_tokens - num_sampled,
        response_tokens=num_sampled,
        reward=trajectory.values["reward"],
        finish_reason=trajectory.values["finish_reason"],
        version_tokens=((0, num_sampled),),
    )


def make_step(seed: int, num_groups: int, n: int = 8, max_response_tokens: int = 40):
    """Metas and payloads of one train step."""
    rng = random.Random(seed)
    groups = [make_group(rng, index, n, max_response_tokens) for index in range(num_groups)]
    return [meta for meta, _ in groups], [payload for _, payload in groups]


def equal_rewards(group: GroupResult) -> GroupResult:
    return replace(group, trajectories=tuple(replace(meta, reward=1.0) for meta in group.trajectories))


def plain_logprobs(model, segment: Arrays, temperature: float = 1.0):
    """Of the sampled tokens of one sequence, by itself, by the model's own logits."""
    import torch

    tokens = torch.tensor(segment["tokens"], dtype=torch.int64)
    logprobs = torch.log_softmax(model(tokens[None]).logits[0] / temperature, dim=-1)[:-1]
    return logprobs.gather(-1, tokens[1:, None])[torch.tensor(segment["mask"][1:]), 0]


class OneRank:
    """`Ranks` without a process group."""

    @property
    def device(self):
        import torch

        return torch.device("cpu")

    world_size = sequence_size = 1
    rank, sequence = 0, None

    def sum(self, tensor):
        return tensor

    max = sum
