from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _killed_engines_are_collected_here() -> Iterator[None]:
    """vLLM leaves the zmq context of an engine that was killed to the garbage collector, which warns in
    whatever test runs then."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
