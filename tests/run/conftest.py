"""The runs of these tests share one cache: the first builds the model, the others find it. None outlives its
test.

A test takes up to a minute, and has 15 of them for slow machines."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.run.commands import started


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(scope="module", autouse=True)
def _shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "cache"
    vllms = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "vllm"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(shared))
        # In an empty one vLLM starts a process to look at the model's class, which computes for 13 s.
        patch.setenv("VLLM_CACHE_ROOT", os.environ.get("VLLM_CACHE_ROOT", str(vllms)))
        yield


@pytest.fixture(autouse=True)
def _no_run_outlives_its_test() -> Iterator[None]:
    """Ended by SIGKILL, a driver's processes end with it."""
    yield
    while started:
        with started.pop() as process:  # closes its pipes
            process.kill()
