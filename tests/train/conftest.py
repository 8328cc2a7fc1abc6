"""Fixtures of the trainer's tests: a tiny random Qwen3 on disk and trainers that leave their process group
again."""

from __future__ import annotations

import itertools
import multiprocessing
import multiprocessing.context
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from tests.train.rank_program import main_each

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.train.train_samples import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def other_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.train.train_samples import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("other-model"), seed=1)


@pytest.fixture
def make_trainer(tmp_path: Path) -> Iterator[Callable]:
    """`make_trainer(trainer_parts(...))` is a single-rank CPU trainer; making another one closes the one
    before."""
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


@pytest.fixture(scope="session")
def rank_context() -> multiprocessing.context.BaseContext:
    """For processes that are forks of one that has imported torch and transformers, and done nothing else:
    the imports are most of a test."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.train.rank_program"])
    # for the process that is forked, and for no later test of this one
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(REPOSITORY), *filter(None, sys.path)]))
        forkserver.ensure_running()
    return context


def received(directory: Path) -> dict[str, Any]:
    """What a worker receives of what the ranks have put there (rank_program.py)."""
    from asyncrl_cli.weights.receivers import verified
    from asyncrl_cli.weights.versions import joined_version
    from tests.packed import copied

    manifest, buckets = joined_version(
        [pickle.loads(path.read_bytes()) for path in sorted(directory.iterdir())]
    )
    return copied(verified(buckets, manifest))


@pytest.fixture(scope="module")
def run_ranks(tmp_path_factory, rank_context):
    """Runs ranks to their end, each in a process of its own, for each of several settings, one after the
    other; returns what a worker would receive after `last_step` of each. `load` and `save`: directories with
    a checkpoint for each of the settings, by their place."""
    directory = tmp_path_factory.mktemp("ranks")
    numbers = itertools.count()

    def run(model_dir, *settings, world_size=1, last_step=3, load=None, save=None, **steps):
        jobs = []
        for place, one in enumerate(settings or [{}]):
            number, checkpoint = next(numbers), str(place)
            job = {"model_dir": str(model_dir), "settings": one, "world_size": world_size, "num_groups": 2}
            job |= {"init_method": f"file://{directory}/rendezvous-{number}", "first_step": 1, **steps}
            job |= {"load": str(load / checkpoint) if load else "", "last_step": last_step}
            job |= {"save": str(save / checkpoint) if save else ""}
            jobs.append(job | {"weights": str(directory / f"weights-{number}")})
            Path(jobs[-1]["weights"]).mkdir()
        with ProcessPoolExecutor(world_size, mp_context=rank_context, max_tasks_per_child=1) as ranks:
            running = [
                ranks.submit(main_each, [job | {"rank": rank} for job in jobs]) for rank in range(world_size)
            ]
            for future in running:
                future.result(timeout=240)
        return [received(Path(job["weights"])) for job in jobs]

    return run
