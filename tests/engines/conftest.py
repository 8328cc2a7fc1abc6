from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from tests.engines import tiny


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model() -> Qwen3ForCausalLM:
    return tiny.make_model()


@pytest.fixture(scope="session")
def model_dir(model: Qwen3ForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(model, tmp_path_factory.mktemp("tiny"))
