"""Child processes in which phases run alone: started together, asked together, ended together. No Ray.

    parent  ask(method, args) ─> pipe ─> child: one phase object, made once, its methods called one after the other
            answers           <─ pipe <─ value, or what was raised

A child ends with the block; or, its pipe being closed, with a parent that was killed. What it prints goes to a log of its
own. The parent waits for an answer, `ANSWER_TIMEOUT_S` at most.
"""

from __future__ import annotations

import logging
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import psutil

from asyncrl_cli.errors import ExecutorFailed
from asyncrl_cli.job.process import set_up_process

ANSWER_TIMEOUT_S = 600.0
"""As long as the start of a job's own workers may take: a large model is loaded here, too."""

MakePhase = Callable[[int, Any], Any]
"""Called in the child with its index, and what `Processes` was given together with the phase's barrier. It imports torch
inside, never at its module's top, and what it makes has a `close`."""


class Barrier(Protocol):
    """Where the processes of one phase meet (`multiprocessing.Barrier`)."""

    def wait(self, timeout: float | None = None) -> int: ...


class Processes:
    """`count` children named `<name>-<index>`, ready when the `with` block begins and gone when it has ended.

    Raises ExecutorFailed, naming the child and its error, wherever one fails or gives no answer.
    """

    def __init__(self, name: str, count: int, make: MakePhase, argument: Any, *, threads: int, log_dir: Path) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        barrier = self._barrier = context.Barrier(count)  # its semaphores live as long as ours
        self._logs = [log_dir / f"{name}-{index}.log" for index in range(count)]
        self._pipes: list[Connection] = []
        self._children = []
        for index, log in enumerate(self._logs):
            ours, theirs = context.Pipe()
            self._pipes.append(ours)
            child_arguments = (theirs, make, index, argument, barrier, threads, log)
            self._children.append((context.Process(target=_serve, args=child_arguments, daemon=True), theirs))

    def __enter__(self) -> Processes:
        for child, theirs in self._children:
            child.start()
            theirs.close()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Killed: a child holds nothing of value, and torch takes its time to end."""
        for child, _ in self._children:
            child.kill()
        for child, _ in self._children:
            child.join()
        for pipe in self._pipes:
            pipe.close()

    def ready(self) -> None:
        """Wait until every child has made its phase."""
        self._answers("its start")

    def ask(self, method: str, *arguments: Any) -> list[Any]:
        """All children do the same at once; their answers, by index."""
        self._tell(method, arguments)
        return self._answers(method)

    @contextmanager
    def doing(self, method: str, *arguments: Any) -> Iterator[None]:
        """All children do it while the block runs, which ends no earlier than they do; nobody wants their answers."""
        self._tell(method, arguments)
        yield
        self._answers(method)

    def _tell(self, method: str, arguments: tuple[Any, ...]) -> None:
        for pipe in self._pipes:
            pipe.send((method, arguments))

    def _answers(self, call: str) -> list[Any]:
        """The first failure counts, whoever else still waits for the failed one."""
        until_s = time.monotonic() + ANSWER_TIMEOUT_S
        answers: dict[int, Any] = {}
        while len(answers) < len(self._pipes):
            waiting = {pipe: index for index, pipe in enumerate(self._pipes) if index not in answers}
            came = wait_for_any(list(waiting), timeout=max(until_s - time.monotonic(), 0.0))
            if not came:
                names = ", ".join(f"{self.name}-{index}" for index in waiting.values())
                raise ExecutorFailed(f"{names}: no answer to {call} within {ANSWER_TIMEOUT_S:g} s")
            for pipe in came:
                assert isinstance(pipe, Connection)
                answers[waiting[pipe]] = self._answer(waiting[pipe], pipe, call)
        return [answers[index] for index in range(len(self._pipes))]

    def _answer(self, index: int, pipe: Connection, call: str) -> Any:
        name = f"{self.name}-{index}"
        try:
            failure, value = pipe.recv()
        except EOFError:
            raise ExecutorFailed(f"{name} ended during {call}: {_last_words(self._logs[index])}") from None
        if failure:
            raise ExecutorFailed(f"{name} failed in {call}: {failure}")
        return value


class CpuTime:
    """What this process and its children compute from now on, in CPU seconds of one core: those of the busiest thread or,
    if that is more, the mean of the busiest process over `threads`. (An engine may compute in a child.)

    A sum over threads would hide what others take: two threads with half a core each make a CPU second per second, too.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._began_s = _thread_seconds()

    def spent_s(self) -> float:
        now_s = _thread_seconds()
        spent_s = {
            pid: [s - self._began_s.get(pid, {}).get(thread, 0.0) for thread, s in own.items()] for pid, own in now_s.items()
        }
        return max(max(max(own), sum(own) / self._threads) for own in spent_s.values())


def _since(before_s: Mapping[int, float], now_s: Mapping[int, float]) -> list[float]:
    return [spent_s - before_s.get(thread, 0.0) for thread, spent_s in now_s.items()]


def _thread_seconds() -> dict[int, dict[int, float]]:
    """By process and thread."""
    seconds: dict[int, dict[int, float]] = {}
    this = psutil.Process()
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.Error):  # a child that ends while we look
            seconds[process.pid] = {thread.id: thread.user_time + thread.system_time for thread in process.threads()}
    return seconds


def _serve(pipe: Connection, make: MakePhase, index: int, argument: Any, barrier: Barrier, threads: int, log: Path) -> None:
    """In the child. An error ends it, after it was told."""
    set_up_process(threads=threads, log_path=log)
    try:
        phase = make(index, (argument, barrier))
        pipe.send(("", None))
        try:
            while True:
                method, arguments = pipe.recv()
                pipe.send(("", getattr(phase, method)(*arguments)))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            phase.close()  # the parent is gone
    except Exception as error:
        logging.getLogger(__name__).exception("the phase failed")
        pipe.send((f"{type(error).__name__}: {error}", None))


def _last_words(log: Path) -> str:
    lines: Sequence[str] = log.read_text(errors="replace").split("\n") if log.is_file() else ()
    return next((line for line in reversed(lines) if line.strip()), "it said nothing")
