"""Finds and verifies the weights of an export, and says where they come from.

Which weights RUN|CHECKPOINT and --version mean:

RUN                  the trainer's weights in the newest whole checkpoint
CHECKPOINT           the trainer's weights in that checkpoint
RUN --version N      kept version N (`weights.keep_versions`), else from a checkpoint that holds version N:
                     the trainer's weights if it was made at a window's end, or the published weights that
                     a checkpoint in mid-window contains
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from asyncrl_cli.base.errors import RefusedError
from asyncrl_cli.checkpoint.lookup import find_run_or_checkpoint, has_checkpoints, resolve
from asyncrl_cli.checkpoint.reader import Checkpoint, Damaged, checkpoints_in, load_checkpoint, read_manifest
from asyncrl_cli.observe.recorded import Recorded
from asyncrl_cli.profile.arithmetic import Schedule
from asyncrl_cli.profile.resolved import read_document
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.weights.versions import VERSIONS, kept_versions, version_directory

RESOLVED = "config.resolved.json"
VERSIONS_SHOWN = 8
Progress = Callable[..., None]
"""Called with (current activity) or (current activity, amount done, total amount)."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Weights and where they come from. `files`: of a kept version; none for those in the checkpoint `path`,
    which are the trainer's own or, if `is_published`, the published version's.

    `step`: the number of train steps that made them. `version`: None if they are between two versions; then
    `after_version` is the older one. `passed_over`: why newer checkpoints were skipped. `notes`: on damaged
    events of the run that were left out."""

    files: tuple[Path, ...]
    path: Path
    run: str
    run_dir: Path | None
    profile: Profile
    step: int
    version: int | None
    after_version: int | None = None
    is_published: bool = False
    passed_over: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def has_adapters(self) -> bool:
        """Whether the weights are LoRA's adapters alone. A published version is always whole."""
        return not (self.files or self.is_published) and bool(self.profile.lora.rank)

    def __str__(self) -> str:
        which = f"version {self.version}"
        if self.after_version is not None:
            which = f"between versions {self.after_version} and {self.after_version + 1}"
        return f"{which} (step {self.step}) of run '{self.run}'"


def find_source(argument: str, runs_dir: Path, version: int | None, progress: Progress) -> Source:
    """Raises ConfigError if there is no such run or checkpoint, RefusedError if it is damaged or does not
    hold the version."""
    newest, found = resolve(argument, runs_dir), find_run_or_checkpoint(argument, runs_dir)
    if has_checkpoints(found):
        return _of_run(found, version, progress)
    checkpoint = _whole(newest, progress)
    if version not in (None, checkpoint.version):
        hint = f"the whole run may hold it: asyncrl export {run_dir_of(newest) or 'RUN'} --version {version}"
        why = f"checkpoint {newest} holds version {checkpoint.version}, not {version}"
        raise RefusedError(why, hint=hint)
    return _of_checkpoint(checkpoint, version)


def _of_run(run_dir: Path, version: int | None, progress: Progress) -> Source:
    """The newest whole checkpoint. With a version: its kept files, or else the newest whole checkpoint that
    holds it."""
    if version is not None and version in kept_versions(run_dir / VERSIONS):
        return _kept(run_dir, version)
    wrong: list[str] = []
    others: dict[Path, int] = {}
    for directory in checkpoints_in(run_dir / "checkpoints"):
        held = None
        if version is not None:
            with contextlib.suppress(Damaged):
                held = read_manifest(directory)["version"]
        if held == version:
            try:
                return _of_checkpoint(_whole(directory, progress), version, tuple(wrong))
            except RefusedError as error:
                wrong.append(error.message)
        elif held is not None:
            others[directory] = held
    why = f"run '{run_dir.name}': there is no version {version} in it"
    if version is None:
        why = f"run '{run_dir.name}' has no whole checkpoint: {wrong[0]}"
    elif wrong:
        why = f"run '{run_dir.name}': version {version} is not whole: {wrong[0]}"
    parts = []
    if kept := kept_versions(run_dir / VERSIONS):
        more = "..., " if len(kept) > VERSIONS_SHOWN else ""
        shown = ", ".join(map(str, kept[-VERSIONS_SHOWN:]))
        parts.append(f"kept version{'s' if len(kept) > 1 else ''} {more}{shown}")
    parts += [f"version {held} in {path.name}" for path, held in list(others.items())[:VERSIONS_SHOWN]]
    none = "no version is left: weights.keep_versions was 0"
    raise RefusedError(why, hint=f"there are: {', '.join(parts)}" if parts else none)


def _whole(directory: Path, progress: Progress) -> Checkpoint:
    progress(f"checking {directory.name}")
    return load_checkpoint(directory, command="export")


def _of_checkpoint(checkpoint: Checkpoint, version: int | None, passed_over: tuple[str, ...] = ()) -> Source:
    """The trainer's own weights, or the published ones if `version` is given and the trainer has trained
    further since."""
    directory = checkpoint.directory
    profile, run_dir = read_document(directory / RESOLVED).profile, run_dir_of(directory)
    is_between = not checkpoint.at_window_boundary and version is None
    is_published = version is not None and not checkpoint.at_window_boundary
    step, notes = checkpoint.step, tuple[str, ...]()
    if is_published:
        step, notes = step_of(run_dir, profile, checkpoint.version)
    return Source(
        files=(),
        is_published=is_published,
        path=directory,
        # a copied run is named after its directory
        run=checkpoint.run if run_dir is None else run_dir.resolve().name,
        run_dir=run_dir,
        profile=profile,
        step=step,
        version=None if is_between else checkpoint.version,
        after_version=checkpoint.version if is_between else None,
        passed_over=passed_over,
        notes=notes,
    )


def _kept(run_dir: Path, version: int) -> Source:
    directory = version_directory(run_dir / VERSIONS, version)
    profile = read_document(run_dir / RESOLVED).profile
    step, notes = step_of(run_dir, profile, version)
    return Source(
        files=tuple(sorted(directory.glob("*.safetensors"))),
        path=directory,
        run=run_dir.resolve().name,
        run_dir=run_dir,
        profile=profile,
        step=step,
        version=version,
        notes=notes,
    )


def step_of(run_dir: Path | None, profile: Profile, version: int) -> tuple[int, tuple[str, ...]]:
    """The train step that made the version, as the run recorded it, or without a record as it follows from
    the profile; and notes on damaged events that were left out."""
    schedule = Schedule.of(profile)
    planned = min(version * schedule.window_steps, schedule.train_steps)
    if run_dir is None:
        return planned, ()
    recorded = Recorded(run_dir)
    events = (event for event in recorded.events("published") if event.get("version") == version)
    # the first: a resume publishes the version again
    step = next((event["step"] for event in events if "step" in event), planned)
    return step, tuple(recorded.damage.notes)


def run_dir_of(checkpoint: Path) -> Path | None:
    """The run's directory; None if the checkpoint was copied out of it."""
    run_dir, is_inside = checkpoint.parent.parent, checkpoint.parent.name == "checkpoints"
    return run_dir if is_inside and (run_dir / "profile.toml").exists() else None
