"""Finds, verifies and reads (without ranks) the weights that RUN|CHECKPOINT and --version mean. A refusal lists what exists.

RUN                  the trainer's weights in the newest whole checkpoint
CHECKPOINT           the trainer's weights in that checkpoint
RUN --version N      kept version N (`weights.keep_versions`), else from a checkpoint that holds version N: the trainer's weights
                     if it was made at a window's end, or the published weights that a checkpoint in mid-window contains
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from asyncrl_cli.checkpoint.find import find_run_or_checkpoint, has_checkpoints, resolve
from asyncrl_cli.checkpoint.sealed import Checkpoint, Damaged, checkpoints_in, load_checkpoint, read_manifest
from asyncrl_cli.errors import RefusedError
from asyncrl_cli.observe.recorded import Recorded
from asyncrl_cli.profile.arithmetic import Schedule
from asyncrl_cli.profile.loaded import read_document
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.train.trainer_state import CRITIC, PUBLISHED_FILE, SavedState
from asyncrl_cli.weights.disk import kept_versions, version_directory

RESOLVED = "config.resolved.json"
VERSIONS = "versions"
VERSIONS_SHOWN = 8
WEIGHT_PREFIX = "weight/"

Say = Callable[[str], None]
Read = Callable[[Collection[str]], Mapping[str, torch.Tensor]]
"""Reads some tensors by name, so that a model larger than memory can be copied. RefusedError if a file is damaged or gone."""


@dataclass(frozen=True, slots=True)
class SavedWeights:
    """Shapes of all tensors by name, and how to read some of them. Tied tensors appear once, under their first name."""

    shapes: Mapping[str, tuple[int, ...]]
    read: Read


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Weights and where they come from. `step`: the number of train steps that made them. `version`: None if they are between two
    versions; then `after_version` is the older one. `passed_over`: why newer checkpoints were skipped."""

    weights: SavedWeights
    path: Path
    run: str
    run_dir: Path | None
    profile: Profile
    step: int
    version: int | None
    after_version: int | None = None
    passed_over: tuple[str, ...] = ()

    def __str__(self) -> str:
        version = f"between versions {self.after_version} and {self.after_version + 1}" if self.after_version is not None else ""
        return f"{version or f'version {self.version}'} (step {self.step}) of run '{self.run}'"


def find_source(argument: str, runs_dir: Path, version: int | None, say: Say) -> Source:
    """Raises ConfigError if there is no such run or checkpoint, RefusedError if it is damaged or does not hold the version."""
    newest, found = resolve(argument, runs_dir), find_run_or_checkpoint(argument, runs_dir)
    if has_checkpoints(found):
        return _of_run(found, version, say)
    checkpoint = _whole(newest, say)
    if version not in (None, checkpoint.version):
        hint = f"the whole run may hold it: asyncrl export {run_dir_of(newest) or 'RUN'} --version {version}"
        raise RefusedError(f"checkpoint {newest} holds version {checkpoint.version}, not {version}", hint=hint)
    return _of_checkpoint(checkpoint, version)


def _of_run(run_dir: Path, version: int | None, say: Say) -> Source:
    """The newest whole checkpoint. With a version: its kept files, or else the newest whole checkpoint that holds it."""
    if version is not None and version in kept_versions(run_dir / VERSIONS):
        return _kept(run_dir, version)
    wrong: list[str] = []
    others: dict[Path, int] = {}
    for directory in checkpoints_in(run_dir / "checkpoints"):
        if version is None or (held := _version_in(directory)) == version:
            try:
                return _of_checkpoint(_whole(directory, say), version, tuple(wrong))
            except RefusedError as error:
                wrong.append(error.message)
        elif held is not None:
            others[directory] = held
    if version is None:
        why = f"run '{run_dir.name}' has no whole checkpoint: {wrong[0]}"
    else:
        missing = f"version {version} is not whole: {wrong[0]}" if wrong else f"there is no version {version} in it"
        why = f"run '{run_dir.name}': {missing}"
    raise RefusedError(why, hint=_there_are(run_dir, others))


def _version_in(checkpoint: Path) -> int | None:
    """The checkpoint's version; None if its manifest cannot be read."""
    with contextlib.suppress(Damaged):
        return read_manifest(checkpoint)["version"]
    return None


def _whole(directory: Path, say: Say) -> Checkpoint:
    say(f"checking {directory.name}")
    return load_checkpoint(directory, command="export")


def _of_checkpoint(checkpoint: Checkpoint, version: int | None, passed_over: tuple[str, ...] = ()) -> Source:
    """The trainer's own weights, or the published ones if `version` is given and the trainer has trained further since."""
    directory = checkpoint.directory
    profile, run_dir = read_document(directory / RESOLVED).profile, run_dir_of(directory)
    is_between = not checkpoint.at_window_boundary and version is None
    if version is None or checkpoint.at_window_boundary:
        weights, step = trainer_weights(directory), checkpoint.step
    else:
        weights, step = file_weights([directory / PUBLISHED_FILE]), _step_of(run_dir, profile, checkpoint.version)
    return Source(
        weights=weights,
        path=directory,
        run=checkpoint.run if run_dir is None else run_dir.resolve().name,  # a copied run is named after its directory
        run_dir=run_dir,
        profile=profile,
        step=step,
        version=None if is_between else checkpoint.version,
        after_version=checkpoint.version if is_between else None,
        passed_over=passed_over,
    )


def _kept(run_dir: Path, version: int) -> Source:
    directory = version_directory(run_dir / VERSIONS, version)
    profile = read_document(run_dir / RESOLVED).profile
    return Source(
        weights=file_weights(list(directory.glob("*.safetensors"))),
        path=directory,
        run=run_dir.resolve().name,
        run_dir=run_dir,
        profile=profile,
        step=_step_of(run_dir, profile, version),
        version=version,
    )


def _step_of(run_dir: Path | None, profile: Profile, version: int) -> int:
    """The train step that made the version, as the run recorded it. Without the record, as it follows from the profile."""
    published = Recorded(run_dir).events("published") if run_dir is not None else iter(())
    schedule = Schedule.of(profile)
    planned = min(version * schedule.window_steps, schedule.train_steps)
    return next((event["step"] for event in published if event.get("version") == version and "step" in event), planned)


def run_dir_of(checkpoint: Path) -> Path | None:
    """The run's directory; None if the checkpoint was copied out of it."""
    run_dir = checkpoint.parent.parent
    return run_dir if checkpoint.parent.name == "checkpoints" and (run_dir / "profile.toml").exists() else None


def _there_are(run_dir: Path, in_checkpoints: Mapping[Path, int]) -> str:
    """A hint that lists the kept versions and the versions in checkpoints."""
    parts = []
    if kept := kept_versions(run_dir / VERSIONS):
        shown = ", ".join(map(str, kept[-VERSIONS_SHOWN:]))
        parts.append(f"kept version{'s' if len(kept) > 1 else ''} {'..., ' if len(kept) > VERSIONS_SHOWN else ''}{shown}")
    parts += [f"version {version} in {path.name}" for path, version in list(in_checkpoints.items())[:VERSIONS_SHOWN]]
    return f"there are: {', '.join(parts)}" if parts else "no version is left: weights.keep_versions was 0"


def trainer_weights(directory: Path) -> SavedWeights:
    """The policy's float32 master weights in a checkpoint, written by any number of ranks."""
    saved = SavedState(directory)
    weights = {key.removeprefix(WEIGHT_PREFIX): shape for key, shape in saved.shapes.items() if key.startswith(WEIGHT_PREFIX)}
    shapes = {name: shape for name, shape in weights.items() if not name.startswith(CRITIC)}

    def read(names: Collection[str]) -> dict[str, torch.Tensor]:
        tensors = {name: torch.empty(shapes[name], dtype=torch.float32) for name in names}
        for name, tensor in tensors.items():
            saved.read(f"{WEIGHT_PREFIX}{name}", tensor)
        return tensors

    return SavedWeights(shapes, read)


def file_weights(paths: Collection[Path]) -> SavedWeights:
    """One version in safetensors files: a kept version, or the published weights inside a checkpoint."""
    path_of: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(paths):
        with _opened(path) as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
        path_of |= {name: path for name in shapes if name not in path_of}

    def read(names: Collection[str]) -> dict[str, torch.Tensor]:
        with contextlib.ExitStack() as stack:
            files = {path: stack.enter_context(_opened(path)) for path in {path_of[name] for name in names}}
            return {name: files[path_of[name]].get_tensor(name) for name in names}

    return SavedWeights(shapes, read)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A safetensors file. RefusedError if it cannot be opened, or read during the block."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise RefusedError(
            f"weights in {path} cannot be read: {error}",
            hint="a live run may have replaced them: export again, or take another checkpoint or --version",
        ) from error
