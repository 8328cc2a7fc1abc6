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

from asyncrl_cli.base.errors import AsyncrlError, ConfigError, PreflightError
from asyncrl_cli.bench.bars import Bars
from asyncrl_cli.bench.contest import Entry
from asyncrl_cli.bench.results import FinishedRun
from asyncrl_cli.checkpoint.run_directory import stem_of
from asyncrl_cli.job.driver_process import StopRequests
from asyncrl_cli.observe.recorded import read_metrics

POLL_S = 0.5
STOP_EXTRA_S = 30.0
"""Added to `run.stop_grace_s`, the time that a stopped run has: ending Ray takes longer."""
KINDS: dict[int, type[AsyncrlError]] = {2: ConfigError, 3: PreflightError}


@dataclass(frozen=True, slots=True, kw_only=True)
class RealRun:
    """One run to make, in the directory `runs_dir/name`. Its stdout, which is JSON, goes to `output`, its
    stderr to `log`."""

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
        sets = [
            *self.entry.sets,
            f"run.seed={self.seed}",
            f"run.total_rollout_steps={self.groups}",
            "eval.every_versions=0",
            "checkpoint.every_steps=0",
        ]
        words = [word for text in sets for word in ("--set", text)]
        words += ["--runs-dir", str(self.runs_dir), "--name", self.name, "--ui", "none", "--json"]
        words += ["--address", self.address or "local"]
        return [sys.executable, "-m", "asyncrl_cli", "train", "--profile", self.entry.reference, *words]


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
                _show_status(run, bars)
        except BaseException:
            bars.say(f"stopping {run.name}; Ctrl-C again ends it at once")
            end(child, run.entry.profile.run.stop_grace_s + STOP_EXTRA_S, interrupts)
            raise
    if code != 0:
        raise KeyboardInterrupt if interrupts else _failure(run, code)
    lines = read_metrics(run.directory / "metrics.jsonl")
    bars.run(run.name, run.groups, run.groups, time_s=lines[-1]["time_s"])
    return FinishedRun(profile=run.entry.name, seed=run.seed, lines=lines), bool(interrupts)


def end(child: subprocess.Popen[bytes], grace_s: float, interrupts: Sequence[float]) -> None:
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


def _wait(child: subprocess.Popen[bytes], limit_s: float, interrupts: Sequence[float]) -> int | None:
    """The exit code; None if the child still runs after `limit_s` or when a new interrupt comes."""
    until_s, seen = time.monotonic() + limit_s, len(interrupts)
    while (code := child.poll()) is None and time.monotonic() < until_s and len(interrupts) == seen:
        time.sleep(min(0.1, limit_s))
    return code


def _show_status(run: RealRun, bars: Bars) -> None:
    """Groups trained, and the run's time, phase (with what it does while it starts) and time left, from its
    status.json."""
    try:
        status = json.loads((run.directory / "status.json").read_text(encoding="utf-8"))
        progress, phase = status["progress"], str(status["phase"])
        if doing := status.get("doing"):
            phase = f"{phase}: {doing}"
        groups, time_s, left_s = int(progress["groups_trained"]), progress["time_s"], progress.get("eta_s")
    except (FileNotFoundError, ValueError, KeyError):
        bars.run(run.name, 0, run.groups, phase="starting")
    else:
        bars.run(run.name, groups, run.groups, time_s=time_s, phase=phase, left_s=left_s)


def _failure(run: RealRun, code: int) -> AsyncrlError:
    """The run's own error and hint (or its last line of output, if it was killed), with the place of its
    log."""
    output = run.log.read_text(encoding="utf-8", errors="replace").splitlines()
    last_line = next((line for line in reversed(output) if line.strip()), "it said nothing")
    try:
        found = json.loads(run.output.read_text(encoding="utf-8"))
    except ValueError:
        found = {}
    logs = run.directory / "logs" / "latest"
    where = f"its log: {logs / 'driver.log' if logs.is_dir() else run.log}"
    how = f"signal {-code}" if code < 0 else f"exit {code}"
    message = f"the run {run.name} failed ({how}): {found.get('error') or last_line}"
    return KINDS.get(code, AsyncrlError)(message, hint="; ".join(filter(None, [found.get("hint"), where])))
