"""Finds runs and checkpoints by a name or a path from the command line, reads a run's last status, and takes
and tests its lock.

Two drivers never write to the same run: each holds an exclusive flock on `<run>/lock`, which the kernel
releases when the process ends, even by SIGKILL.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shlex
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

from asyncrl_cli.base.errors import ConfigError, RefusedError, first_names
from asyncrl_cli.base.paths import as_typed, where_runs_are
from asyncrl_cli.base.safe_files import (
    MAX_JSON_BYTES,
    UnsafeFile,
    open_regular,
    parse_json,
    read_bytes,
    read_text,
    reason,
)
from asyncrl_cli.base.storage import naming
from asyncrl_cli.checkpoint.reader import (
    LOOP_STATE,
    STEP_NAME,
    Checkpoint,
    checkpoints_in,
    finish_interrupted_replacements,
    sealed_checkpoints,
    step_name,
    step_of,
)
from asyncrl_cli.profile.toml_files import toml_value

LOCK, LAST = "lock", "last"
REPLAY = "replay.json"
"""In the directory of a replay (job/driver_replay.py): of which run, what was changed, and how it failed."""
STARTING = "starting"
"""The phase in status.json until the loop runs."""
UNENDED = STARTING, "running", "stopping"
"""The phases that status.json may show after a run was killed."""
MAX_LOCK_BYTES = 1000
LOOK_TIMEOUT_S = 10.0
"""How long `take_lock` waits for processes in `is_locked`. They hold a lock for a moment, or longer if they
are suspended then."""


def whole_name(name: str, runs_dir: Path) -> str:
    """The name of the newest run for `last`, or else `name` itself."""
    is_taken = name != LAST or os.path.isdir(runs_dir / name) or os.path.isdir(name)
    return name if is_taken else next(iter(run_names(runs_dir)), name)


def find_run(argument: str, runs_dir: Path) -> Path:
    """The directory of the run with this path or name (`whole_name`). Raises ConfigError if there is none."""
    argument = whole_name(argument, runs_dir)
    for candidate in (runs_dir / argument, Path(argument)):
        if _is_run(candidate):
            return candidate.resolve()
    run_dir = runs_dir / argument
    outputs = (detached_output(run_dir), failed_start(run_dir)) if run_dir.name else ()
    hints = (f"if it failed to start, {path} says why" for path in outputs if os.path.exists(path))
    raise ConfigError(
        f"no run '{argument}' in {runs_dir.absolute()}",
        hint=next(hints, "") or known_runs(runs_dir, argument),
    )


def detached_output(run_dir: Path) -> Path:
    """Where a detached driver writes until its run has begun: beside the run's directory, which a failed
    start removes."""
    return run_dir.with_name(f".{run_dir.name}-detached.out")


def failed_start(run_dir: Path) -> Path:
    """Where the logs of a run are kept if its start failed."""
    return run_dir.with_name(f".{run_dir.name}-failed-start")


def train_again(run_dir: Path, name: str) -> str:
    """The command that starts a run with the profile of another."""
    return f"asyncrl train --profile {shlex.quote(str(run_dir / 'profile.toml'))} --name {name}"


def begin_anew(run_dir: Path) -> str:
    """The command that replaces a run, or a replay, that was killed before its first checkpoint."""
    if replay := last_status(run_dir, REPLAY):
        begins = shlex.quote(f"{replay.get('of')}/step-{replay.get('from_step')}")
        changes = cast("dict[str, Any]", replay.get("changes") or {})
        sets = (shlex.quote(f"{key}={toml_value(value)}") for key, value in changes.items())
        changed = "".join(f" --set {text}" for text in sets)
        return f"asyncrl replay {begins}{changed} --name {as_typed(run_dir)}"
    return f"{train_again(run_dir, run_dir.name)}{where_runs_are(run_dir.parent)} --resume auto"


def go_on(run_dir: Path) -> str:
    """A hint: the command with which a run goes on that has ended or is about to, and what it does."""
    if sealed := sealed_checkpoints(run_dir / "checkpoints"):
        return f"`asyncrl resume {as_typed(run_dir)}` continues from step {step_of(sealed[0])}"
    is_killed = last_status(run_dir).get("phase") in UNENDED and not is_locked(run_dir)
    if is_killed and not has_had_checkpoint(run_dir):
        return f"`{begin_anew(run_dir)}` replaces it"
    return f"`{train_again(run_dir, 'NAME')}` starts a new run"


def has_had_checkpoint(run_dir: Path) -> bool:
    """Whether a run has a checkpoint, or had one whose files are gone (unmounted, moved or deleted)."""
    return bool(checkpoints_in(run_dir / "checkpoints") or last_status(run_dir).get("checkpoint"))


def run_names(runs_dir: Path) -> list[str]:
    """Names of the runs below `runs_dir`, the one that ran last first."""

    def active_s(run: Path) -> float:
        status = run / "status.json"  # only drivers write it; a report or an audit changes the directory, too
        return (status if os.path.exists(status) else run).stat().st_mtime

    try:
        runs = [(active_s(path), path.name) for path in runs_dir.iterdir() if _is_run(path)]
    except OSError:
        return []
    return [name for _, name in sorted(runs, reverse=True)]


def known_runs(runs_dir: Path, missing: str = "") -> str:
    """Text for a hint: the runs in `runs_dir`, or those whose names `missing` is the beginning of."""
    names = run_names(runs_dir)
    if not names:
        return f"{runs_dir.absolute()} has no runs; --runs-dir names another place"
    if similar := [name for name in names if missing and name.startswith(missing)]:
        return f"did you mean {first_names(similar)}"
    return f"known runs: {', '.join(names[:8])}" + (", ..." if len(names) > 8 else "")


def last_status(run_dir: Path, file: str = "status.json") -> Mapping[str, object]:
    """The content of a run's status.json, or of another of its files; empty if it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return parse_json(read_bytes(run_dir / file, max_bytes=MAX_JSON_BYTES), dict[str, object])
    return {}


def take_lock(run_dir: Path) -> TextIO | None:
    """Lock a run until the returned file is closed. Returns None at once if another driver holds the lock,
    and after `LOOK_TIMEOUT_S` if a process that only tests it (`is_locked`) does not let go.

    Raises RefusedError if the lock file cannot be opened or is not a regular file.
    """
    path = run_dir / LOCK
    try:
        with contextlib.suppress(FileNotFoundError):
            open_regular(path).close()
        file = path.open("a+", encoding="utf-8")
    except (OSError, UnsafeFile) as error:
        hint = "check that you may write to the directory"
        raise RefusedError(f"{path} cannot be locked: {reason(error)}", hint=hint) from None
    with contextlib.ExitStack() as closing:
        closing.enter_context(file)
        until_s = time.monotonic() + LOOK_TIMEOUT_S
        while not _flock(file, fcntl.LOCK_EX):
            # a driver's lock is never shared
            if not _flock(file, fcntl.LOCK_SH) or time.monotonic() > until_s:
                return None
            fcntl.flock(file, fcntl.LOCK_UN)
            time.sleep(0.01)
        with naming(path):
            os.ftruncate(file.fileno(), 0)
            os.write(file.fileno(), f"pid {os.getpid()} on {socket.gethostname()}".encode())
        closing.pop_all()
    return file


def is_locked(run_dir: Path) -> bool:
    """Whether a live driver holds the run. Tests with a shared lock, so that simultaneous tests do not block
    each other."""
    try:
        file = open_regular(run_dir / LOCK)
    except (OSError, UnsafeFile):  # a lock that is missing or not a regular file cannot be held
        return False
    with file:
        return not _flock(file, fcntl.LOCK_SH)


def holder(run_dir: Path) -> str:
    """Who wrote the lock last, for messages: `pid 4711 on host`."""
    with contextlib.suppress(OSError, ValueError):
        if text := read_text(run_dir / LOCK, max_bytes=MAX_LOCK_BYTES):
            return text
    return "another process"  # it has the lock but has not written its pid yet


def refuse_ended(checkpoint: Checkpoint, train_steps: int) -> None:
    """Raises RefusedError if this is the last checkpoint of a finished run, and `train_steps` leaves nothing
    to train, or of a replay, which has nothing left but its eval."""
    run_dir = checkpoint.directory.parent.parent
    phase, replay = last_status(run_dir).get("phase"), last_status(run_dir, REPLAY)
    if replay and (replay.get("failure") or phase == "done" or train_steps > checkpoint.step):
        why = f"run '{checkpoint.run}' is a replay: it has trained all steps that were recorded"
        hint = "resume the run that it replays, or `asyncrl export` its weights for another run"
        raise RefusedError(why, hint=hint)
    if phase == "done" and checkpoint.step == train_steps:
        why = f"run '{checkpoint.run}' is done: it has trained all of its {train_steps} steps"
        hint = f"--set run.train_steps={2 * train_steps} continues it; or resume an earlier checkpoint"
        raise RefusedError(why, hint=hint)


def resolve(argument: str, runs_dir: Path) -> Path:
    """The checkpoint that an argument CHECKPOINT|RUN names. Raises what `find_run_or_checkpoint` does, and
    RefusedError for a run without checkpoints.

    For a run, this is the newest checkpoint, even if it is damaged: `load_checkpoint` then refuses it and
    names an intact one, so that nobody resumes from an older state unknowingly.
    """
    found = find_run_or_checkpoint(argument, runs_dir)
    if not has_checkpoints(found):
        return found
    runs_now = is_locked(found)
    if not runs_now:
        finish_interrupted_replacements(found / "checkpoints")
    checkpoints = checkpoints_in(found / "checkpoints")
    if not checkpoints and runs_now:
        hint = f"`asyncrl watch {as_typed(found)}` shows it, `asyncrl stop {as_typed(found)}` ends it"
        raise RefusedError(f"run '{found.name}' is running, and has no checkpoint yet", hint=hint)
    if not checkpoints:
        raise _no_checkpoint(found)
    return checkpoints[0]


def find_run_or_checkpoint(argument: str, runs_dir: Path) -> Path:
    """The directory of a run, given by name or path, or of a checkpoint, given by path or as RUN/step-N.

    Raises ConfigError if there is no such directory, RefusedError if the directory is neither a run nor a
    checkpoint.
    """
    argument = whole_name(argument, runs_dir)
    run, _, last = argument.rpartition("/")
    run = whole_name(run, runs_dir)
    step = int(match[1]) if (match := re.fullmatch(r"step-([0-9]{1,15})", last)) else None
    candidates = [runs_dir / argument, Path(argument)]
    if run and step is not None:  # with or without leading zeros
        candidates += [place / run / "checkpoints" / step_name(step) for place in (runs_dir, Path())]
    for candidate in candidates:
        if has_checkpoints(candidate):
            return candidate
        is_named_so = os.path.isdir(candidate) and STEP_NAME.fullmatch(candidate.resolve().name)
        if is_named_so or os.path.exists(candidate / LOOP_STATE):
            return candidate.resolve()
    for found in (place / name for name in (argument, run) if name for place in (runs_dir, Path())):
        # a profile.toml alone may be a task's own
        is_run = any(os.path.exists(found / name) for name in ("config.resolved.json", "status.json"))
        if is_run and not has_checkpoints(found):
            raise _no_checkpoint(found)
    if os.path.isdir(argument):
        why = f"{argument} is neither a run nor a checkpoint: it holds no checkpoints/ and no manifest.json"
        raise RefusedError(why, hint=known_runs(runs_dir))
    hint = known_runs(runs_dir, argument if step is None else run)
    if step is not None and run and has_checkpoints(runs_dir / run):
        known = [path.name for path in checkpoints_in(runs_dir / run / "checkpoints")]
        hint = f"checkpoints of {run}: {first_names(known)}"
    elif step is not None and not run:
        name = step_name(step)
        places = {f"{run}/{name}": runs_dir / run / "checkpoints" / name for run in run_names(runs_dir)}
        if having := [known for known, place in places.items() if place.is_dir()]:
            hint = f"did you mean {first_names(having)}"
    raise ConfigError(f"no run or checkpoint '{argument}' in {runs_dir.absolute()}", hint=hint)


def _no_checkpoint(run_dir: Path) -> RefusedError:
    """For a run from which nothing can be resumed: it never had a checkpoint, or they are gone."""
    if not (last := last_status(run_dir).get("checkpoint")):
        return RefusedError(f"run '{run_dir.name}' has no checkpoint yet", hint=go_on(run_dir))
    why = f"the checkpoints of run '{run_dir.name}' are gone: the last that it wrote was {last}"
    return RefusedError(why, hint=f"bring them back to {run_dir / 'checkpoints'}, or {go_on(run_dir)}")


def has_checkpoints(directory: Path) -> bool:
    return os.path.isdir(directory / "checkpoints")


def _flock(file: TextIO | BinaryIO, kind: int) -> bool:
    """Lock the file without waiting. False if another process holds it."""
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(file, kind | fcntl.LOCK_NB)
        return True
    return False


def _is_run(directory: Path) -> bool:
    """Whether this is a run's directory. False if it cannot be read."""
    return any(os.path.exists(directory / name) for name in ("profile.toml", "status.json"))
