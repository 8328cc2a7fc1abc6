"""`asyncrl export`, as a function: find the weights, check them against the configuration, write the directory.

find_source ──> find_model_files ──> skeleton, check_fit ──> write_directory ──> Exported
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from asyncrl_cli.export.directory import Read, Written, check_target, write_directory
from asyncrl_cli.export.model_files import check_fit, find_model_files
from asyncrl_cli.export.saved_weights import SavedWeights
from asyncrl_cli.export.source import Source, find_source
from asyncrl_cli.models.resolve import check_config

if TYPE_CHECKING:
    from asyncrl_cli.models.saved_form import SavedForm

Dtype = Literal["float32", "bfloat16"]
Progress = Callable[..., None]
"""Called with (what is being done) or (what is being done, done so far, of how many)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    path: Path
    source: Source
    dtype: str
    written: Written

    def to_json(self) -> dict[str, Any]:
        """`version` is null if the trainer has trained on since `after_version`."""
        return {
            "path": str(self.path),
            "run": self.source.run,
            "source": str(self.source.path),
            "version": self.source.version,
            "after_version": self.source.after_version,
            "step": self.source.step,
            "dtype": self.dtype,
            "parameters": self.written.parameters,
            "num_bytes": self.written.num_bytes,
            "files": list(self.written.files),
            "passed_over": list(self.source.passed_over),
        }


def export(
    argument: str,
    *,
    runs_dir: Path,
    version: int | None = None,
    out: Path | None = None,
    dtype: Dtype | None = None,
    model: Path | None = None,
    max_file_bytes: int,
    progress: Progress = lambda *_: None,
) -> Exported:
    """`dtype` None: the one in which the trainer publishes. `out` None: below `exports/` in the run's directory.

    Raises:
        ConfigError, RefusedError, PreflightError: see `find_source`, `check_target`, `find_model_files`, `check_fit`.
        AsyncrlError: if the directory cannot be written.
    """
    if out is not None:
        check_target(out)  # before every byte of the checkpoint is read
    source = find_source(argument, runs_dir, version, progress)
    target = out or _default_target(source.run_dir, source.run, source.path.name, version)
    check_target(target)
    model_files = find_model_files(source.run_dir, source.profile, model)
    progress("reading the configuration")
    check_config(model_files)
    from asyncrl_cli.models.saved_form import SavedForm  # imports transformers: seconds that an error above does not cost
    from asyncrl_cli.models.skeleton import skeleton

    form = SavedForm(skeleton(model_files, trust_remote_code=source.profile.model.trust_remote_code))
    tensors, is_as_in_files = check_fit(form, source.weights.shapes, model_files)
    sizes, read = _as_in_files(None if is_as_in_files else form, tensors, source.weights)
    chosen = dtype or source.profile.model.dtype
    written = write_directory(
        target, sizes, read, dtype=chosen, model_files=model_files, max_file_bytes=max_file_bytes, progress=progress
    )
    return Exported(path=target, source=source, dtype=chosen, written=written)


def _default_target(run_dir: Path | None, run: str, name: str, version: int | None) -> Path:
    name = name if version is None else f"version-{version:06d}"
    return Path(f"{run}-{name}") if run_dir is None else run_dir / "exports" / name


def _as_in_files(form: SavedForm | None, tensors: Mapping[str, torch.Tensor], weights: SavedWeights) -> tuple[dict[str, int], Read]:
    """Elements of every tensor that the files shall hold, and how to read some of them.

    Where transformers splits or joins tensors between memory and files, all of them are read and held at once: a tensor of a
    file may come of several. Else (also with no `form`: they are as in files) they are read as they are asked for.
    """
    if form is None or not form.converts:
        return {name: tensor.numel() for name, tensor in tensors.items()}, weights.read
    whole = form.to_files(weights.read(list(tensors)))

    def some(names: Sequence[str]) -> Mapping[str, torch.Tensor]:
        return {name: whole[name] for name in names}

    return {name: tensor.numel() for name, tensor in whole.items()}, some
