from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from tests.engines import tiny

DEADLINE_S = 300.0


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test may be a coroutine: it runs in the event loop of the `World` that it uses, or in one of its
    own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    run = next((fixture.run for fixture in given.values() if hasattr(fixture, "run")), _run)
    run(lambda: pyfuncitem.obj(**given))
    return True


def _run(body: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(body(), DEADLINE_S))


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
