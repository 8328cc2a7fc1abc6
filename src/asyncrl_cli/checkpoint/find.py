"""Finding runs and checkpoints: what a name or a path on a command line means, which checkpoints are whole, what is in them."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from asyncrl_cli.checkpoint.manifest import Damaged, damage, read_manifest
from asyncrl_cli.checkpoint.runs import is_locked, known_runs, last_status
from asyncrl_cli.errors import ConfigError, RefusedError
from asyncrl_cli.safe_files import Count, load_json
from asyncrl_cli.storage import remove

LOOP_STATE = "loop_state.json"
STEP_NAME = re.compile(r"step-([0-9]{6,15})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A whole checkpoint, read back. `directory` also holds what the trainer wrote."""

    directory: Path
    step: int
    version: int
    at_window_boundary: bool
    loop_state: Mapping[str, Any]
    run: str


class LoopStateFile(TypedDict):
    """`loop_state.json`; what is in `loop_state` is the loop's affair (loop/cuts.py)."""

    schema_version: Literal[1]
    step: Count
    version: Count
    at_window_boundary: bool
    loop_state: dict[str, Any]


def step_name(step: int) -> str:
    return f"step-{step:06d}"


def step_of(directory: Path) -> int:
    match = STEP_NAME.fullmatch(directory.name)
    assert match is not None, directory
    return int(match.group(1))


def checkpoints_in(directory: Path) -> list[Path]:
    """Directories named like checkpoints, newest step first, whole or not."""
    if not directory.is_dir():
        return []
    named = [path for path in directory.iterdir() if STEP_NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(named, key=step_of, reverse=True)


def load_checkpoint(directory: Path, command: str = "resume") -> Checkpoint:
    """Verify a checkpoint and read the loop's part of it.

    Raises RefusedError if it is damaged, of another schema or no asyncrl checkpoint; the hint names the newest intact one, as
    `asyncrl COMMAND` takes it.
    """
    try:
        return _read(directory)
    except Damaged as error:
        listed = "; ".join(error.wrong[:5]) + (f"; and {len(error.wrong) - 5} more" if len(error.wrong) > 5 else "")
    intact = newest_intact(directory.parent)
    hint = f"the newest intact one: asyncrl {command} {intact}" if intact else "there is no intact checkpoint beside it"
    raise RefusedError(f"checkpoint {directory} is refused: {listed}", hint=hint)


def verify(directory: Path) -> tuple[str, ...]:
    """What is wrong with a checkpoint, one sentence each; empty if it is whole. Reads every byte."""
    try:
        _read(directory)
    except Damaged as error:
        return error.wrong
    return ()


def newest_intact(directory: Path) -> Path | None:
    """The newest whole checkpoint in a `checkpoints/` directory, verified byte by byte."""
    return next((path for path in checkpoints_in(directory) if not verify(path)), None)


def sealed_checkpoints(directory: Path) -> list[Path]:
    """Newest first, and only those with a manifest: whatever else has such a name is nobody's to link or delete."""
    sealed = []
    for path in checkpoints_in(directory):
        with contextlib.suppress(Damaged):
            read_manifest(path)
            sealed.append(path)
    return sealed


def _read(directory: Path) -> Checkpoint:
    """Raises Damaged with all that is wrong."""
    if not directory.is_dir():
        raise Damaged(f"{directory} is not a directory")
    manifest = read_manifest(directory)
    step, version = manifest["step"], manifest["version"]
    wrong = damage(directory, manifest)
    if STEP_NAME.fullmatch(directory.name) and step_of(directory) != step:
        wrong.append(f"the directory's name does not fit its step {step}")
    if LOOP_STATE not in manifest["files"]:
        wrong.append(f"{LOOP_STATE} is not part of it")
    if wrong:
        raise Damaged(*wrong)
    try:  # a file that is whole need not have been written by asyncrl
        state = load_json(directory / LOOP_STATE, LoopStateFile)
    except RefusedError as error:
        raise Damaged(error.message) from None
    if (state["step"], state["version"]) != (step, version):
        raise Damaged(f"{LOOP_STATE} is of step {state['step']}, the manifest of step {step}")
    return Checkpoint(
        directory=directory,
        step=step,
        version=version,
        at_window_boundary=state["at_window_boundary"],
        loop_state=state["loop_state"],
        run=manifest["run"],
    )


def refuse_ended(checkpoint: Checkpoint) -> None:
    """Raises RefusedError if the run has come to its end with this checkpoint: there is nothing to continue."""
    known = last_status(checkpoint.directory.parent.parent)
    if known.get("phase") == "done" and checkpoint.step == known.get("train_steps"):
        raise RefusedError(
            f"run '{checkpoint.run}' is done: it has trained all of its {checkpoint.step} steps",
            hint="start another run with more run.train_steps, or resume an earlier checkpoint of this one",
        )


def resolve(argument: str, runs_dir: Path) -> Path:
    """The checkpoint that CHECKPOINT|RUN means. Raises as `find_run_or_checkpoint`, and RefusedError for a run without any.

    For a run it is the newest checkpoint, whole or not: `load_checkpoint` refuses a damaged one and names another, so that nobody
    resumes from an older state without knowing it.
    """
    found = find_run_or_checkpoint(argument, runs_dir)
    if not has_checkpoints(found):
        return found
    if not is_locked(found):
        finish_interrupted_replacements(found / "checkpoints")
    checkpoints = checkpoints_in(found / "checkpoints")
    if not checkpoints:
        raise RefusedError(f"run '{found.name}' has no checkpoint yet", hint="start a new run with `asyncrl train --name NAME`")
    return checkpoints[0]


def find_run_or_checkpoint(argument: str, runs_dir: Path) -> Path:
    """The directory of a run, given by name or path, or of a checkpoint.

    Raises ConfigError if there is no such directory, RefusedError if it is something else's.
    """
    for candidate in (runs_dir / argument, Path(argument)):
        if has_checkpoints(candidate):
            return candidate
        is_named_so = os.path.isdir(candidate) and STEP_NAME.fullmatch(candidate.resolve().name)
        if is_named_so or os.path.exists(candidate / LOOP_STATE):
            return candidate.resolve()
    if os.path.isdir(argument):
        raise RefusedError(
            f"{argument} is neither a run nor a checkpoint: it holds no checkpoints/ and no manifest.json",
            hint=known_runs(runs_dir),
        )
    raise ConfigError(f"no run or checkpoint '{argument}' (looked in {runs_dir})", hint=known_runs(runs_dir))


def has_checkpoints(directory: Path) -> bool:
    return os.path.isdir(directory / "checkpoints")


def finish_interrupted_replacements(directory: Path) -> None:
    """After a crash: bring back what was set aside with nothing in its place, clear what was half done."""
    for aside in directory.glob(".replaced-step-*"):
        original = aside.with_name(aside.name.removeprefix(".replaced-"))
        if original.exists() or not STEP_NAME.fullmatch(original.name):
            remove(aside)
        else:
            aside.rename(original)
    for pattern in (".writing-step-*", ".deleting-*"):
        for leftover in directory.glob(pattern):
            remove(leftover)
