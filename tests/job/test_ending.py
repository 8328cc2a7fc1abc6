"""Ends of a run: stops by file and signal, outside cancellation, the last dump. Without Ray."""

from __future__ import annotations

import asyncio
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl_cli.base.errors import AsyncrlError, ExecutorFailed, Interrupted, StallError
from asyncrl_cli.checkpoint.writer import PROFILE_FILES, CheckpointStore
from asyncrl_cli.contracts.ports import LoopSnapshot
from asyncrl_cli.job.driver_loop import RunResult, run_to_the_end
from asyncrl_cli.job.driver_process import StopRequests
from asyncrl_cli.simulate.world import run_virtual

DIRECTORY: Any = SimpleNamespace(name="otter", path=Path("otter"), stop_requests=lambda: 0)


class FakePipeline:
    def __init__(self, error: Exception | None = None, lasts_s: float = 0.0) -> None:
        self.error = error
        self.lasts_s = lasts_s
        self.was_cancelled = False
        self.state = SimpleNamespace(progress=SimpleNamespace(step=2), grace_s=60.0)

    async def run(self) -> None:
        try:
            await asyncio.sleep(self.lasts_s)
        except asyncio.CancelledError:
            self.was_cancelled = True
            raise
        if self.error:
            raise self.error

    def request_stop(self) -> None:
        pass


class FakeTrainer:
    """As far as its dumps go: one is being written."""

    def __init__(self) -> None:
        self.dumps_awaited = 0

    async def finish_dumps(self) -> None:
        await asyncio.sleep(0.01)
        self.dumps_awaited += 1


class FakeObservers:
    def __init__(self) -> None:
        self.phases: list[str] = []
        self.remarks: list[str] = []

    def remark(self, message: str) -> None:
        self.remarks.append(message)

    def close(self, phase: str, error: str = "") -> dict[str, Any]:
        self.phases.append(phase)
        return {"phase": phase}


def ended(pipeline: FakePipeline, trainer: FakeTrainer) -> RunResult:
    async def main() -> RunResult:
        return await run_to_the_end(pipeline, trainer, DIRECTORY, FakeObservers(), StopRequests())  # type: ignore[arg-type]

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("error", "exit_code", "dumps_awaited"),
    [(None, 0, 1), (Interrupted("stopped after step 3"), 130, 1), (ExecutorFailed("rollout-0 failed"), 1, 0)],
)
def test_the_last_dump_is_awaited_at_every_end_in_order(error, exit_code, dumps_awaited):
    trainer = FakeTrainer()
    assert ended(FakePipeline(error), trainer).exit_code == exit_code
    assert trainer.dumps_awaited == dumps_awaited


def test_a_stop_that_was_asked_for_is_no_error_in_the_log(caplog):
    with caplog.at_level("INFO", logger="asyncrl"):
        ended(FakePipeline(Interrupted("stopped after step 3")), FakeTrainer())
        ended(FakePipeline(ExecutorFailed("rollout-0 failed")), FakeTrainer())
    told = [(record.levelname, record.message, record.exc_info is not None) for record in caplog.records]
    assert told == [("INFO", "stopped after step 3", False), ("ERROR", "rollout-0 failed", True)]


def test_a_cancellation_from_outside_ends_the_loop_and_is_passed_on():
    async def main() -> None:
        pipeline, observers = FakePipeline(lasts_s=1e6), FakeObservers()
        running = asyncio.create_task(
            run_to_the_end(pipeline, FakeTrainer(), DIRECTORY, observers, StopRequests())
        )  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert (pipeline.was_cancelled, observers.phases) == (True, ["stopped"])

    asyncio.run(asyncio.wait_for(main(), 10))


@pytest.mark.parametrize(("number", "again"), [(signal.SIGINT, "another Ctrl-C"), (None, "a second request")])
def test_a_first_request_is_answered_on_the_screen(number, again):
    async def main() -> list[str]:
        requests, observers = StopRequests(), FakeObservers()
        pipeline = FakePipeline(lasts_s=0.05)
        running = asyncio.create_task(run_to_the_end(pipeline, FakeTrainer(), DIRECTORY, observers, requests))  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        requests.request(number)
        await running
        return observers.remarks

    assert asyncio.run(main()) == [
        f"stopping after this train step, within 60 s; {again} ends the run at once"
    ]


def test_a_stop_that_took_too_long_names_the_steps_that_are_lost(tmp_path):
    directory: Any = SimpleNamespace(path=tmp_path, checkpoints=tmp_path / "checkpoints")
    pipeline: Any = FakePipeline(StallError("the stop took longer than 60 s", hint="more time"))
    ending = run_to_the_end(pipeline, FakeTrainer(), directory, FakeObservers(), StopRequests())  # type: ignore[arg-type]
    error = asyncio.run(ending).error
    assert error is not None
    anew = f"`asyncrl train --profile {tmp_path / 'profile.toml'} --name NAME` starts a new run"
    assert error.hint == f"there is no checkpoint yet; {anew}; more time"


@pytest.mark.parametrize(
    ("saved", "why"),
    [
        (None, "there is no checkpoint yet"),
        (0, "steps 1 to 2 were not in a checkpoint"),
        (1, "step 2 was not in a checkpoint"),
        (2, "the step in progress is lost"),
    ],
)
def test_an_abort_names_the_steps_that_are_lost(tmp_path, saved, why):
    async def write_trainer(directory: Path, snapshot: LoopSnapshot) -> None:
        pass

    async def main() -> RunResult:
        run = tmp_path / "otter"
        if saved is not None:
            (run / "checkpoints").mkdir(parents=True)
            for name in PROFILE_FILES:
                (run / name).touch()
            store = CheckpointStore(run, keep=1, profile="p", write_trainer=write_trainer)
            await store.write(LoopSnapshot(step=saved, version=0, at_window_boundary=True, loop_state={}))
        directory: Any = SimpleNamespace(path=run, checkpoints=run / "checkpoints")
        requests, pipeline = StopRequests(), FakePipeline(lasts_s=1e6)
        ending = run_to_the_end(pipeline, FakeTrainer(), directory, FakeObservers(), requests)  # type: ignore[arg-type]
        running = asyncio.create_task(ending)
        for _ in range(2):
            await asyncio.sleep(0.01)
            requests.request(signal.SIGINT)
        return await running

    result = asyncio.run(asyncio.wait_for(main(), 10))
    assert (result.exit_code, str(result.error)) == (130, f"aborted: {why}")


def test_outside_the_main_thread_signals_are_left_alone():
    errors: list[BaseException] = []

    async def main() -> None:
        with StopRequests().on_signals():
            await asyncio.sleep(0)

    def work() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors == []


def test_a_stop_file_that_cannot_be_read_for_a_while_is_read_later(caplog):
    answers = [0, OSError("stale file handle"), OSError("stale file handle"), 1]
    stops: list[int] = []

    def num_requests() -> int:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, OSError):
            raise answer
        return answer

    async def main() -> None:
        watching = asyncio.ensure_future(
            StopRequests(lambda: stops.append(1), lambda: stops.append(2)).watch(num_requests)
        )
        await asyncio.sleep(10)
        watching.cancel()

    run_virtual(main())
    assert stops == [1]
    told = [record.getMessage() for record in caplog.records if record.name == "asyncrl"]
    assert [message.count("stale file handle") for message in told] == [1]


def test_a_full_disk_is_told_with_the_checkpoints_step(tmp_path):
    async def write_trainer(directory: Path, snapshot: LoopSnapshot) -> None:
        raise OSError(28, "No space left on device")

    store = CheckpointStore(tmp_path / "otter", keep=1, profile="p", write_trainer=write_trainer)
    snapshot = LoopSnapshot(step=40, version=10, at_window_boundary=True, loop_state={})
    with pytest.raises(
        AsyncrlError, match=r"the checkpoint of step 40 cannot be written: .*No space left"
    ) as caught:
        asyncio.run(store.write(snapshot))
    assert "free some space" in caught.value.hint
