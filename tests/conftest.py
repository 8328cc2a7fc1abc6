"""What every test has: one compute thread, no hub, no telemetry and a plain terminal. The user's ASYNCRL_*
variables, settings of the terminal and ignored signals do not reach it.

pytest runs several processes (pyproject.toml): the slowest files come first, so that none is left alone with
one.
"""

from __future__ import annotations

import functools
import gc
import os
import signal
from collections import Counter
from collections.abc import Generator, Iterator

import hypothesis
import pytest
import typer.main

for name, value in {
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # a call without a session is a mistake: Ray would start one that nobody ends
    "RAY_ENABLE_AUTO_CONNECT": "0",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_SILENT": "true",
}.items():
    os.environ.setdefault(name, value)

# What rich and typer read of a terminal. The tests say themselves how wide it is and whether there is one.
for name in (
    "COLUMNS",
    "LINES",
    "FORCE_COLOR",
    "NO_COLOR",
    "PY_COLORS",
    "GITHUB_ACTIONS",
    "TTY_COMPATIBLE",
    "TTY_INTERACTIVE",
):
    os.environ.pop(name, None)
os.environ["TERM"] = "xterm"

# `nohup pytest` and `pytest &` in a script ignore them, and so would every run of ours.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)

FIRST = ("run", "audit", "benchmarks", "vllm", "remote", "job", "train", "transformers", "simulate", "bench")
"""The tests of these rooms start whole processes or compute: few of them take long. What comes last is
short."""

# How long it takes to draw or to run an example depends on the machine.
hypothesis.settings.register_profile(
    "suite", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("suite")


@pytest.fixture(scope="session", autouse=True)
def _one_command_tree() -> Iterator[None]:
    """Typer builds it for every command line, which is most of what a refused one takes: here once for
    hundreds of them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))
        yield


@pytest.fixture(autouse=True)
def _no_foreign_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.upper().startswith("ASYNCRL_") or name == "RAY_ADDRESS"]:
        monkeypatch.delenv(name)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays: the garbage collector, which took a tenth of the time, need not
    look at it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or extension modules call what is left at the interpreter's end a leak


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of rooms whose tests start whole processes, and in each room those with most of what is slow."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))

    def place(item: pytest.Item) -> tuple[int, int]:
        room = item.path.parent.name
        return FIRST.index(room) if room in FIRST else len(FIRST), -slow[item.path]

    items.sort(key=place)
