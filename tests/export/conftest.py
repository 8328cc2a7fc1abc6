"""A run directory as a driver leaves it: a kept version, a checkpoint at a window's end and one in
mid-window."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl_cli.builtin.tiny import tiny_tokenizer
from asyncrl_cli.checkpoint.writer import CheckpointStore
from asyncrl_cli.contracts.ports import LoopSnapshot
from asyncrl_cli.models.model_files import keep_model_files
from asyncrl_cli.profile.resolved import to_document, to_toml
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.train.policy_trainer import PolicyTrainer
from asyncrl_cli.weights.senders import keep_version
from tests.train.conftest import make_trainer as make_trainer
from tests.train.conftest import rank_context as rank_context
from tests.train.conftest import run_ranks as run_ranks
from tests.train.train_samples import make_step, save_tiny_model
from tests.trainers import planned, trainer_parts

K = 2
SEQUENCE = [3, 1, 4, 1, 5, 9, 2, 6]


@dataclass(frozen=True)
class MadeRun:
    """`weights` by first names, and `logprobs` of SEQUENCE: what the trainer had after each step."""

    directory: Path
    model_dir: Path
    weights: dict[int, dict[str, torch.Tensor]]
    logprobs: dict[int, list[float]]

    @property
    def runs_dir(self) -> Path:
        return self.directory.parent


def model_with_tokenizer(directory: Path, *, tied: bool = False) -> Path:
    save_tiny_model(directory, tied=tied)
    tiny_tokenizer("abcdefgh").save_pretrained(directory)
    return directory


def open_run(runs_dir: Path, name: str, profile: Profile) -> Path:
    import json

    directory = runs_dir / name
    directory.mkdir(parents=True)
    (directory / "profile.toml").write_text(to_toml(profile, {}))
    (directory / "config.resolved.json").write_text(json.dumps(to_document(profile, {})))
    return directory


def profile_of(model_dir: Path | str, dtype: str = "float32") -> Profile:
    training = {"trigger_parameter_sync_step": K}
    model = {"path": str(model_dir), "dtype": dtype}
    return Profile.model_validate({"run": {"train_steps": 6}, "async_training": training, "model": model})


def checkpoint(directory: Path, step: int, write: Callable[[Path], None]) -> Path:
    async def write_trainer(working: Path, snapshot: LoopSnapshot) -> None:
        write(working)

    store = CheckpointStore(directory, keep=9, profile="custom", write_trainer=write_trainer)
    return asyncio.run(
        store.write(
            LoopSnapshot(step=step, version=step // K, at_window_boundary=step % K == 0, loop_state={})
        )
    )


def train(trainer: PolicyTrainer, step: int) -> None:
    metas, payloads = make_step(step, num_groups=2)
    (plan,) = planned(metas)
    trainer.train(step_in_window=(step - 1) % K, plan=plan, payloads=dict(enumerate(payloads)))


@pytest.fixture(scope="session")
def made_runs() -> dict[tuple[bool, str], MadeRun]:
    """By (tied, dtype): made once, copied for every test."""
    return {}


@pytest.fixture
def make_run(tmp_path: Path, tmp_path_factory: Any, made_runs: Any) -> Callable[..., MadeRun]:
    """Three steps: version 1 after step 2 is kept and published, step 3 lies between versions 1 and 2.

    The run's directory is the test's; the model's only if it is `of_its_own`.
    """

    def make(*, tied: bool = False, dtype: str = "float32", of_its_own: bool = False) -> MadeRun:
        if of_its_own:
            return _make(tmp_path, tied=tied, dtype=dtype)
        if (tied, dtype) not in made_runs:
            made_runs[tied, dtype] = _make(tmp_path_factory.mktemp("made"), tied=tied, dtype=dtype)
        made = made_runs[tied, dtype]
        copy = shutil.copytree(made.directory, tmp_path / "runs" / made.directory.name, symlinks=True)
        return replace(made, directory=copy)

    return make


def _make(place: Path, *, tied: bool, dtype: str) -> MadeRun:
    model_dir = model_with_tokenizer(place / "original", tied=tied)
    directory = open_run(place / "runs", "otter", profile_of(model_dir, dtype))
    keep_model_files(model_dir, directory)
    settings = trainer_parts(model_dir, dtype=dtype, lr=1e-3)
    trainer = settings.made(f"file://{place}/rendezvous")
    weights, logprobs = {}, {}
    try:
        for step in (1, 2, 3):
            train(trainer, step)
            weights[step] = {name: local.clone() for name, local in trainer.model.locals().items()}
            logprobs[step] = trainer.model.logprobs([SEQUENCE])[0]
            if step == K:
                trainer.gather(1)
                keep_version(directory / "versions", *trainer.published(1), model_dir, 3)
            if step >= K:
                trainer.snapshot(step)
                checkpoint(directory, step, lambda path, step=step: trainer.write(step, path, step % K != 0))
    finally:
        trainer.close()
    for path in model_dir.glob("*.safetensors"):
        path.unlink()  # an export needs none of the original's weights
    return MadeRun(directory, model_dir, weights, logprobs)
