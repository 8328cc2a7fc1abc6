"""Fixtures of the trainer's tests: a tiny random Qwen3 on disk and trainers that leave their process group again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.train.train_samples import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture
def make_trainer(tmp_path: Path) -> Iterator[Callable]:
    """`make_trainer(trainer_parts(...))` is a single-rank CPU trainer; making another one closes the one before."""
    made = []

    def make(parts):
        if made:
            made.pop().close()
        init_method = f"file://{tmp_path}/rendezvous-{len(list(tmp_path.glob('rendezvous-*')))}"
        made.append(parts.made(init_method))
        return made[-1]

    yield make
    if made:
        made.pop().close()
