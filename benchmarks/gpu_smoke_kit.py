"""Shared by the checks of gpu_smoke.py: the machine, random models by size, made-up groups, and the
exceptions that end a check."""

from __future__ import annotations

import gc
import math
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from engine_kit import RandomModel, save_tokenizer
from numpy.typing import NDArray

from asyncrl_cli.contracts.prompt_group import AttemptKey, GroupResult, TrajectoryMeta
from asyncrl_cli.data.sample_fields import BUILT_IN
from asyncrl_cli.data.trajectories import GroupPayload, Trajectory, trajectory_of
from asyncrl_cli.profile.schema import ModelSection, ProcessPlace, Profile, TrainerSection
from asyncrl_cli.train.step_plan import plan_train_step

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from asyncrl_cli.train.policy_trainer import PolicyTrainer

Figures = dict[str, Any]
"""What a check has measured, by name. It is shown even if the check fails later."""
PROMPT_TOKENS = 32
GROUP_SIZE = 8
LEARNING_RATE = 1e-3
"""Large enough that an engine on the old weights shows."""

OTHER_SETTINGS: dict[str, Any] = dict(
    max_position_embeddings=32_768, bos_token_id=None, eos_token_id=None, pad_token_id=0, dtype="float32"
)
"""Of all random models, whatever their size."""
SIZES = {  # hidden, intermediate, layers, query heads, key-value heads, head's size, vocabulary
    "small": (64, 192, 2, 4, 2, 32, 256),
    "medium": (128, 384, 3, 4, 2, 32, 512),
    "large": (192, 576, 4, 6, 2, 32, 1024),
    "0.1B": (768, 2304, 10, 12, 4, 64, 32_768),
    "0.5B": (1024, 3072, 22, 16, 8, 128, 151_936),
    "1.7B": (2048, 6144, 28, 16, 8, 128, 151_936),
}
"""Sizes of random Qwen3 models. The last is Qwen3-1.7B, and the one before it Qwen3-0.6B with 22 of its 28
layers."""


class Skipped(Exception):
    """The check cannot be run here, for this reason."""


class Wrong(Exception):
    """The check was run, and what came out is wrong."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the checks are run: `device` is cpu or cuda. Models are made in `directory`, once for all
    checks."""

    device: str
    directory: Path
    threads: int = 1

    @property
    def is_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def dtype(self) -> str:
        """The dtype that users take on this device."""
        return "bfloat16" if self.is_gpu else "float32"

    @property
    def main(self) -> RandomModel:
        return self.model("0.5B" if self.is_gpu else "small")

    def model(self, size: str) -> RandomModel:
        directory = self.directory / size.replace(".", "_")
        if not directory.exists():
            _save_model(SIZES[size], directory, torch.device(self.device))
        return RandomModel(
            directory=directory, parameters=_parameters(SIZES[size]), vocab_size=SIZES[size][-1]
        )

    def place(self, model: RandomModel) -> ProcessPlace:
        return ProcessPlace(model_dir=str(model.directory), device=self.device, threads=self.threads)

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def profile(self, **sections: Any) -> Profile:
        trainer = sections.pop("trainer", TrainerSection(lr=LEARNING_RATE))
        return Profile(
            model=sections.pop("model", ModelSection(dtype=self.dtype)), trainer=trainer, **sections
        )


@contextmanager
def trainer_on(machine: Machine, model: RandomModel, profile: Profile) -> Iterator[PolicyTrainer]:
    """A trainer of one rank, which leaves its memory when the block ends."""
    from asyncrl_cli.train.policy_trainer import PolicyTrainer

    with tempfile.TemporaryDirectory() as directory:
        meeting = f"file://{directory}/meet"
        trainer = PolicyTrainer(
            profile, machine.place(model), rank=0, init_method=meeting, total_optimizer_steps=1
        )
        try:
            yield trainer
        finally:
            trainer.close()
    del trainer
    release(machine)


def release(machine: Machine) -> None:
    gc.collect()
    if machine.is_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


@dataclass(frozen=True, slots=True)
class Step:
    """A train step on made-up groups: random tokens, by a model that has learned nothing, with rewards by
    chance."""

    model: RandomModel
    groups: int = 4
    response_tokens: int = 48
    number: int = 1
    is_ragged: bool = True
    prompt_tokens: int = PROMPT_TOKENS
    has_one_prompt: bool = False
    """A group's trajectories have the same prompt. Otherwise they have no first token in common."""
    payloads: dict[int, GroupPayload] = field(default_factory=dict, init=False)

    def arguments(self, profile: Profile) -> dict[str, Any]:
        made = [self._group(self.number * self.groups + index) for index in range(self.groups)]
        (plan,) = plan_train_step(
            [result for result, _ in made], profile, ranks=1, step=self.number, window=0
        )
        return dict(step_in_window=0, plan=plan, payloads=dict(enumerate(payload for _, payload in made)))

    @property
    def positions(self) -> int:
        """Tokens that the decoder reads, if all responses are of full length."""
        return self.groups * GROUP_SIZE * (self.prompt_tokens + self.response_tokens - 1)

    def _group(self, number: int) -> tuple[GroupResult, GroupPayload]:
        draw, key = random.Random(number), AttemptKey(f"prompt-{number}", 0, 0)
        least = self.response_tokens // 4 if self.is_ragged else self.response_tokens
        lengths = [draw.randint(least, self.response_tokens) for _ in range(GROUP_SIZE)]
        rewards = [float(index % 2) for index in range(GROUP_SIZE)]
        prompt = self._random_tokens(draw, self.prompt_tokens) if self.has_one_prompt else None
        trajectories = [
            self._trajectory(draw, prompt, length, reward)
            for length, reward in zip(lengths, rewards, strict=True)
        ]
        metas = [
            TrajectoryMeta(
                prompt_tokens=self.prompt_tokens,
                response_tokens=length,
                reward=reward,
                finish_reason="stop",
                version_tokens=((0, length),),
            )
            for length, reward in zip(lengths, rewards, strict=True)
        ]
        result = GroupResult(key=key, trajectories=tuple(metas), failures=(), failed_tokens=0, payload=None)
        return result, GroupPayload(uid=key.uid, epoch=0, attempt=0, trajectories=tuple(trajectories))

    def _random_tokens(self, draw: random.Random, number: int) -> NDArray[Any]:
        return np.random.default_rng(draw.getrandbits(32)).integers(self.model.vocab_size, size=number)

    def _trajectory(
        self, draw: random.Random, prompt: NDArray[Any] | None, length: int, reward: float
    ) -> Trajectory:
        sampled = np.arange(self.prompt_tokens + length) >= self.prompt_tokens
        tokens = self._random_tokens(draw, len(sampled))
        if prompt is not None:
            tokens[: self.prompt_tokens] = prompt
        segment = dict(
            tokens=tokens.astype(np.int32),
            logprobs=np.where(sampled, -math.log(self.model.vocab_size), 0.0).astype(np.float32),
            versions=np.where(sampled, 0, -1).astype(np.int32),
            mask=sampled,
        )
        return trajectory_of((segment,), BUILT_IN, reward=reward, finish_reason="stop")


def _parameters(size: tuple[int, ...]) -> int:
    hidden, intermediate, layers, heads, kv_heads, head_dim, vocab_size = size
    layer = 2 * hidden * head_dim * (heads + kv_heads) + 3 * hidden * intermediate + 2 * hidden + 2 * head_dim
    return layers * layer + hidden * vocab_size + hidden


def _save_model(size: tuple[int, ...], directory: Path, device: torch.device) -> None:
    """A Qwen3 with a tied head."""
    from transformers import Qwen3Config

    hidden, intermediate, layers, heads, kv_heads, head_dim, vocab_size = size
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        tie_word_embeddings=True,
        **OTHER_SETTINGS,
    )
    save_random(config, directory, device)


def save_random(config: PretrainedConfig, directory: Path, device: torch.device) -> None:
    """A model with random weights. Its end-of-sequence token is outside its vocabulary."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config)
    if device.type == "cuda":
        model.to(torch.bfloat16)
    model.save_pretrained(part := directory.with_suffix(".part"))
    save_tokenizer(part, end_of_sequence=config.vocab_size)
    part.rename(directory)  # only now: a check that is ended meanwhile leaves no half of a model
    del model
    if device.type == "cuda":
        torch.cuda.empty_cache()
