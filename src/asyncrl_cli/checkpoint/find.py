"""Checkpoints found again: verified, loaded or refused, and what CHECKPOINT|RUN on a command line means."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from asyncrl_cli.checkpoint.files import remove
from asyncrl_cli.checkpoint.lock import is_locked
from asyncrl_cli.checkpoint.manifest import Manifest, ManifestError, damage, read_manifest
from asyncrl_cli.errors import ConfigError, RefusedError
from asyncrl_cli.safe_files import MAX_JSON_BYTES, Count, load_json, parse_json, read_bytes

LOOP_STATE = "loop_state.json"
LOOP_STATE_SCHEMA_VERSION = 1
STEP_NAME = re.compile(r"step-([0-9]{6,15})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A whole checkpoint, read back. `directory` also holds what the trainer wrote."""

    directory: Path
    step: int
    version: int
    at_window_boundary: bool
    loop_state: Mapping[str, Any]
    fields: Mapping[str, Any]
    run: str
    profile: str
    identity: Mapping[str, Any]


class LoopStateFile(TypedDict):
    """`loop_state.json`; what is in `loop_state` is the loop's affair (loop/codec.py)."""

    schema_version: Literal[1]
    step: Count
    version: Count
    at_window_boundary: bool
    loop_state: dict[str, Any]
    fields: dict[str, Any]


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


def verify(directory: Path) -> list[str]:
    """What is wrong with a checkpoint, one sentence each; empty if it is whole. Reads every byte."""
    if not directory.is_dir():
        return [f"{directory} is not a directory"]
    try:
        manifest = read_manifest(directory)
    except ManifestError as error:
        return [str(error)]
    wrong = damage(directory, manifest)
    if STEP_NAME.fullmatch(directory.name) and step_of(directory) != manifest.step:
        wrong.append(f"the directory's name does not fit its step {manifest.step}")
    if LOOP_STATE not in manifest.files:
        wrong.append(f"{LOOP_STATE} is not part of it")
    return wrong or _wrong_in_state(directory, manifest)


def _wrong_in_state(directory: Path, manifest: Manifest) -> list[str]:
    """Of a file that is whole: whoever wrote it may not have been asyncrl."""
    try:
        state = load_json(directory / LOOP_STATE, LoopStateFile)
    except RefusedError as error:
        return [error.message]
    fits = (state["step"], state["version"]) == (manifest.step, manifest.version)
    return [] if fits else [f"{LOOP_STATE} is of step {state['step']}, the manifest of step {manifest.step}"]


def newest_intact(directory: Path) -> Path | None:
    """The newest whole checkpoint in a `checkpoints/` directory, verified byte by byte."""
    return next((path for path in checkpoints_in(directory) if not verify(path)), None)


def load_checkpoint(directory: Path, *, identity: Mapping[str, Any] | None = None) -> Checkpoint:
    """Verify a checkpoint and read the loop's part of it.

    Raises RefusedError if it is damaged, of another schema, no asyncrl checkpoint, or (with `identity`) of a profile
    that differs in these keys; the hint names the newest intact one beside it.
    """
    wrong = verify(directory)
    if wrong:
        listed = "; ".join(wrong[:5]) + (f"; and {len(wrong) - 5} more" if len(wrong) > 5 else "")
        raise RefusedError(f"checkpoint {directory} is refused: {listed}", hint=_way_out(directory))
    manifest = read_manifest(directory)
    state = load_json(directory / LOOP_STATE, LoopStateFile)
    _check_identity(directory, manifest.identity, identity)
    return Checkpoint(
        directory=directory,
        step=manifest.step,
        version=manifest.version,
        at_window_boundary=state["at_window_boundary"],
        loop_state=state["loop_state"],
        fields=state["fields"],
        run=manifest.run,
        profile=manifest.profile,
        identity=manifest.identity,
    )


def refuse_ended(checkpoint: Checkpoint) -> None:
    """Raises RefusedError if the run has come to its end with this checkpoint: there is nothing to continue."""
    status = checkpoint.directory.parent.parent / "status.json"
    with contextlib.suppress(OSError, ValueError):
        known = parse_json(read_bytes(status, max_bytes=MAX_JSON_BYTES), dict[str, Any])
        if known.get("phase") == "done" and checkpoint.step == known.get("train_steps"):
            raise RefusedError(
                f"run '{checkpoint.run}' is done: it has trained all of its {checkpoint.step} steps",
                hint="start another run with more run.train_steps, or resume an earlier checkpoint of this one",
            )


def resolve(argument: str, runs_dir: Path) -> Path:
    """Find the checkpoint that CHECKPOINT|RUN means: a checkpoint directory, a run directory, or a run's name.

    Of a run it is the newest checkpoint, whole or not: `load_checkpoint` refuses a damaged one and offers another, so
    that nobody goes back further than he knows. Raises ConfigError if there is no such thing, RefusedError if it is
    a directory of something else or a run without checkpoints.
    """
    for candidate in (Path(argument), runs_dir / argument):
        if os.path.isdir(candidate / "checkpoints"):
            return _newest_of_run(candidate)
        if os.path.isdir(candidate) and (STEP_NAME.fullmatch(candidate.resolve().name) or (candidate / LOOP_STATE).exists()):
            return candidate.resolve()
        if os.path.isdir(candidate) and candidate == Path(argument) and argument not in run_names(runs_dir):
            raise RefusedError(
                f"{argument} is neither a run nor a checkpoint: it holds no checkpoints/ and no manifest.json",
                hint=_known_runs(runs_dir),
            )
    raise ConfigError(f"no run or checkpoint '{argument}' (looked in {runs_dir})", hint=_known_runs(runs_dir))


def is_run(directory: Path) -> bool:
    """Whether it is a run's directory. One that cannot be looked into is none."""
    return any(os.path.exists(directory / name) for name in ("profile.toml", "status.json"))


def run_names(runs_dir: Path) -> list[str]:
    """Names of the runs below `runs_dir`, most recently touched first."""
    try:
        runs = [(path.stat().st_mtime, path.name) for path in runs_dir.iterdir() if is_run(path)]
    except OSError:
        return []
    return [name for _, name in sorted(runs, reverse=True)]


def _newest_of_run(run_dir: Path) -> Path:
    if not is_locked(run_dir):
        finish_interrupted_replacements(run_dir / "checkpoints")
    found = checkpoints_in(run_dir / "checkpoints")
    if not found:
        raise RefusedError(f"run '{run_dir.name}' has no checkpoint yet", hint="start a new run with `asyncrl train --name NAME`")
    return found[0]


def _known_runs(runs_dir: Path) -> str:
    names = run_names(runs_dir)
    if not names:
        return f"there are no runs in {runs_dir}; --runs-dir names another place"
    return f"known runs: {', '.join(names[:8])}" + (", ..." if len(names) > 8 else "")


def _way_out(directory: Path) -> str:
    intact = newest_intact(directory.parent)
    if intact is None:
        return "there is no intact checkpoint beside it"
    return f"the newest intact one: asyncrl resume {intact}"


def _check_identity(directory: Path, found: Mapping[str, Any], wanted: Mapping[str, Any] | None) -> None:
    differing = [key for key in wanted or {} if found.get(key) != (wanted or {})[key]]
    if differing:
        listed = ", ".join(f"{key} = {found.get(key)!r} there, {(wanted or {})[key]!r} here" for key in differing)
        raise RefusedError(
            f"checkpoint {directory} belongs to another profile: {listed}",
            hint="resume it with the profile it was made with, or start a new run",
        )


def is_sealed(directory: Path) -> bool:
    with contextlib.suppress(ManifestError):
        read_manifest(directory)
        return True
    return False


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
