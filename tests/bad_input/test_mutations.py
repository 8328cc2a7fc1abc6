"""One JSON node of a run changed at random, with all checksums right: who reads it refuses it, or goes on to
the run's end."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl_cli.base.errors import ConfigError, RefusedError
from asyncrl_cli.checkpoint.payloads import read_payloads
from asyncrl_cli.cli.app import run
from asyncrl_cli.job.driver_prompts import PromptFeed, refuse_other_prompts
from asyncrl_cli.job.driver_run import Run
from asyncrl_cli.loop.pipeline import Pipeline
from asyncrl_cli.loop.run_state import ResumeFrom, World
from asyncrl_cli.observe.live_status import facts_of
from asyncrl_cli.observe.observers import Observers
from asyncrl_cli.profile.arithmetic import LoopSettings
from asyncrl_cli.simulate.simulated_trainer import SimulatedTrainer, TrainerTimes
from asyncrl_cli.simulate.simulated_worker import SimulatedWorker
from asyncrl_cli.simulate.world import run_virtual
from asyncrl_cli.tasks.task import load_task
from tests.bad_input.made import DELETE, NAME, Place, edit_json, make_place, reseal, set_at
from tests.loop.worlds import worker_times

FILES = ("loop_state.json", "payloads.json", "config.resolved.json")
VALUES = (None, True, 0, 1, -1, 2, 7, 300, 2**70, 0.5, "", "x", "nan", [], [1], {}, {"a": 1}, [[]], "\ud800")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return make_place(tmp_path_factory.mktemp("made"))


def nodes(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of everything inside."""
    entries: Iterable[tuple[Any, Any]] = ()
    if isinstance(content, dict | list):
        entries = content.items() if isinstance(content, dict) else enumerate(content)
    return [found for key, value in entries for found in ((*path, key), *nodes(value, (*path, key)))]


def mutated(path: Path, data: st.DataObject) -> None:
    node = data.draw(st.sampled_from(nodes(json.loads(path.read_text()))), label="node")
    removed = data.draw(st.booleans(), label="removed")
    value = DELETE if removed else data.draw(st.sampled_from(VALUES), label="value")
    edit_json(path, set_at(node, value))


@contextmanager
def put_back(directory: Path) -> Iterator[None]:
    """Undo at the end what is changed within."""
    with TemporaryDirectory() as kept:
        shutil.copytree(directory, kept, dirs_exist_ok=True)
        try:
            yield
        finally:
            shutil.rmtree(directory)
            shutil.copytree(kept, directory)


def resume_and_go_on(place: Place) -> None:
    """All that a resume does with a checkpoint but Ray: and then the whole rest of the run, on the virtual
    clock."""
    resumed = Run.resume(NAME, runs_dir=place.runs)
    assert resumed.checkpoint is not None
    profile, task = resumed.profile, load_task(resumed.profile)
    refuse_other_prompts(resumed.checkpoint, task, profile.run.seed)
    payloads = [(None,)] * len(read_payloads(resumed.checkpoint.directory))

    async def main() -> None:
        world = World(
            feed=PromptFeed(task.train, seed=profile.run.seed, eval_sets={"": task.eval}),
            trainer=SimulatedTrainer(TrainerTimes(train_s=lambda batch: 0.7)),
            workers=[SimulatedWorker(f"rollout-{i}", 8, worker_times(), 0, None) for i in range(2)],
            eval_sets={"": task.eval},
            observers=[Observers(facts_of(profile, place.run, 2), [])],
            resume_from=ResumeFrom(loop_state=resumed.checkpoint.loop_state, payloads=payloads),
        )
        await Pipeline(LoopSettings.of(profile), world).run()

    run_virtual(main())


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=150, suppress_health_check=list(HealthCheck))
def test_a_checkpoint_is_refused_or_resumed_to_its_end(place: Place, data: st.DataObject) -> None:
    with put_back(place.newest), suppress(ConfigError, RefusedError):
        mutated(place.newest / data.draw(st.sampled_from(FILES), label="file"), data)
        reseal(place.newest)
        resume_and_go_on(place)


def test_an_untouched_checkpoint_is_resumed_to_its_end(place: Place) -> None:
    resume_and_go_on(place)


def test_a_running_group_that_kept_tokens_older_than_its_deadline_allows_is_refused(place: Place) -> None:
    with put_back(place.newest):
        edit_json(place.newest / "loop_state.json", set_at("loop_state.groups.running.0.deadline", 4))
        reseal(place.newest)
        why = r"the deadline of running prompt .* is 4, with tokens of version 2"
        with pytest.raises(RefusedError, match=why):
            resume_and_go_on(place)


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
def test_a_status_is_refused_or_shown(
    place: Place, data: st.DataObject, capsys: pytest.CaptureFixture[str]
) -> None:
    with put_back(place.run):
        mutated(place.run / "status.json", data)
        code = run(["status", NAME, "--runs-dir", str(place.runs)])
    said = capsys.readouterr().err
    assert code in (0, 4), said
    assert "this is a bug" not in said


@pytest.mark.parametrize("value", [None, [None], [{"time_s": 1.0}]])
def test_warnings_that_are_none_are_refused(
    place: Place, value: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with put_back(place.run):
        edit_json(place.run / "status.json", set_at("warnings", value))
        assert run(["status", NAME, "--runs-dir", str(place.runs)]) == 4
    assert "status.json cannot be read: warnings" in capsys.readouterr().err
