"""Makes real runs, each in a child process: `asyncrl train` as a user would call it, followed through its
status.json."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl_cli.base.errors import AsyncrlError, ConfigError, PreflightError
from asyncrl_cli.bench.bars import Bars
from asyncrl_cli.bench.entries import Entry
from asyncrl_cli.bench.results import FinishedRun, timeline_of_run
from asyncrl_cli.checkpoint.run_directory import stem_of
from asyncrl_cli.job.process import StopRequests
from asyncrl_cli.observe.lines import read_metrics

POLL_S = 0.5
STOP_EXTRA_S = 30.0
"""Added to `run.stop_grace_s`, the time that a stopped run has: ending Ray takes longer."""
KINDS: dict[int, type[AsyncrlError]] = {2: ConfigError, 3: PreflightError}


@dataclass(frozen=True, slots=True, kw_only=True)
class RealRun:
    """One run to make, in the directory `runs_dir/name`. Its stdout, which is JSON, goes to `output`, its
    stderr to `log`. The first run of each profile is drawn."""

    entry: Entry
    repeat: int
    seed: int
    groups: int
    runs_dir: Path
    address: str | None = None

    @property
    def name(self) -> str:
        return f"{stem_of(self.entry.name)}-r{self.repeat}"

    @property
    def directory(self) -> Path:
        return self.runs_dir / self.name

    @property
    def output(self) -> Path:
        return self.runs_dir / f"{self.name}.json"

    @property
    def log(self) -> Path:
        return self.runs_dir / f"{self.name}.log"

    def command(self) -> list[str]:
        own = {
            "run.seed": self.seed,
            "run.total_rollout_steps": self.groups,
            "eval.every_versions": 0,
            "checkpoint.every_steps": 0,
        }
        sets = [*self.entry.sets, *(f"{key}={value}" for key, value in own.items())]
        arguments = ["--profile", self.entry.reference, *(part for text in sets for part in ("--set", text))]
        place = ["--runs-dir", str(self.runs_dir), "--name", self.name, "--ui", "none", "--json"]
        place += ["--address", self.address or "local"]
        return [sys.executable, "-m", "asyncrl_cli", "train", *arguments, *place]


def runs_of(
    entries: Sequence[Entry], seeds: Sequence[int], groups: int, runs_dir: Path, address: str | None = None
) -> list[RealRun]:
    """The runs in the order in which they are made."""
    return [
        RealRun(entry=entry, repeat=repeat, seed=seed, groups=groups, runs_dir=runs_dir, address=address)
        for repeat, seed in enumerate(seeds)
        for entry in entries
    ]


def make_run(run: RealRun, bars: Bars) -> tuple[FinishedRun, bool]:
    """Make the run. The second value is True if we were interrupted just as the run finished: it should be
    the last one.

    Interrupted earlier, ends the run and raises KeyboardInterrupt. Raises AsyncrlError with the run's error
    if it fails."""
    run.runs_dir.mkdir(parents=True, exist_ok=True)
    # Signals are only noted here, and checked while waiting: an exception at another point could leave the
    # run behind.
    interrupts: list[float] = []
    requests = StopRequests(lambda: interrupts.append(time.monotonic()))
    with run.output.open("wb") as output, run.log.open("wb") as log, requests.on_signals():
        # In a session of its own, so that a Ctrl-C in the terminal reaches the run only through us.
        child = subprocess.Popen(
            run.command(), stdin=subprocess.DEVNULL, stdout=output, stderr=log, start_new_session=True
        )
        try:
            while (code := _wait(child, POLL_S, interrupts)) is None:
                if interrupts:
                    raise KeyboardInterrupt
                groups, told = _told(run.directory / "status.json")
                bars.run(run.name, groups, run.groups, **told)
        except BaseException:
            bars.say(f"stopping {run.name}; Ctrl-C again ends it at once")
            end(child, run.entry.profile.run.stop_grace_s + STOP_EXTRA_S, interrupts)
            raise
    if interrupts and code != 0:
        raise KeyboardInterrupt
    if code != 0:
        raise _failure(run, code)
    lines = read_metrics(run.directory / "metrics.jsonl")
    bars.run(run.name, run.groups, run.groups, time_s=lines[-1]["time_s"])
    timeline = timeline_of_run(run.entry.name, run.directory, lines) if run.repeat == 0 else None
    return FinishedRun(profile=run.entry.name, seed=run.seed, lines=lines, timeline=timeline), bool(
        interrupts
    )


def end(child: subprocess.Popen[Any], grace_s: float, interrupts: Sequence[float]) -> None:
    """SIGINT for an orderly stop, SIGINT to end at once, SIGTERM, then kill. Each further interrupt skips to
    the next."""
    for number, limit_s in ((signal.SIGINT, grace_s), (signal.SIGINT, STOP_EXTRA_S), (signal.SIGTERM, 5.0)):
        if child.poll() is not None:
            return
        child.send_signal(number)
        if _wait(child, limit_s, interrupts) is not None:
            return
    child.kill()
    child.wait()


def _wait(child: subprocess.Popen[Any], limit_s: float, interrupts: Sequence[float]) -> int | None:
    """The exit code; None if the child still runs after `limit_s` or when a new interrupt comes."""
    until_s, seen = time.monotonic() + limit_s, len(interrupts)
    while (code := child.poll()) is None and time.monotonic() < until_s and len(interrupts) == seen:
        time.sleep(min(0.1, limit_s))
    return code


def _told(path: Path) -> tuple[int, dict[str, Any]]:
    """Groups trained, and the run's time, phase (with what it does while it starts) and time left, from its
    status.json."""
    try:
        status = json.loads(path.read_text(encoding="utf-8"))
        progress, phase = (
            status["progress"],
            ": ".join(filter(None, (str(status["phase"]), status.get("doing")))),
        )
        return int(progress["groups_trained"]), {
            "time_s": progress["time_s"],
            "phase": phase,
            "left_s": progress.get("eta_s"),
        }
    except (FileNotFoundError, ValueError, KeyError):
        return 0, {"phase": "starting"}


def _failure(run: RealRun, code: int) -> AsyncrlError:
    """The run's own error and hint (or its last line of output, if it was killed), with the place of its
    log."""
    said = run.log.read_text(encoding="utf-8", errors="replace").splitlines()
    last_line = next((line for line in reversed(said) if line.strip()), "it said nothing")
    try:
        told = json.loads(run.output.read_text(encoding="utf-8"))
    except ValueError:
        told = {}
    logs = run.directory / "logs" / "latest"
    where = f"its log: {logs / 'driver.log' if logs.is_dir() else run.log}"
    how = f"signal {-code}" if code < 0 else f"exit {code}"
    message = f"the run {run.name} failed ({how}): {told.get('error') or last_line}"
    return KINDS.get(code, AsyncrlError)(message, hint="; ".join(filter(None, [told.get("hint"), where])))
