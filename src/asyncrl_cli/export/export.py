"""`asyncrl export`, as a function: find the weights, check them against the configuration, write the directory.

find_source ──> find_model_files ──> skeleton, fitted ──> files of at most `max_file_bytes` ──> Exported

Configuration and tokenizer are looked for in the run itself (job/run.py keeps a copy there), then where `model.path` points;
neither place needs to hold weights. The directory is written under a hidden name, flushed and renamed: it is complete or absent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError

from asyncrl_cli.errors import AsyncrlError, ConfigError, PreflightError, RefusedError, first_names
from asyncrl_cli.export.adapters import has_adapters, merged_weights, write_adapter
from asyncrl_cli.export.source import Read, SavedWeights, Source, find_source
from asyncrl_cli.models.inspection import TOKENIZER_FILES, check_config
from asyncrl_cli.models.resolve import BUILTIN, HUB_PATTERNS, from_hub, is_on_hub
from asyncrl_cli.paths import expand
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.storage import appearing_directory
from asyncrl_cli.weights.buckets import torch_dtype
from asyncrl_cli.weights.disk import kept_versions, version_directory
from asyncrl_cli.weights.model_files import CONFIG, RUN_COPY, copy_model_files, write_index, write_weights

if TYPE_CHECKING:
    from asyncrl_cli.models.saved_form import SavedForm

MB = 10**6
WAY_OUT = "give a directory with config.json and the tokenizer: --model DIR"
Dtype = Literal["float32", "bfloat16"]
Progress = Callable[..., None]
"""Called with (current activity) or (current activity, amount done, total amount)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    path: Path
    source: Source
    dtype: str
    parameters: int
    num_bytes: int
    files: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """`version` is null if the trainer has trained further since it published `after_version`."""
        return {
            "path": str(self.path),
            "run": self.source.run,
            "source": str(self.source.path),
            "version": self.source.version,
            "after_version": self.source.after_version,
            "step": self.source.step,
            "dtype": self.dtype,
            "parameters": self.parameters,
            "num_bytes": self.num_bytes,
            "files": list(self.files),
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
    adapter: bool = False,
    progress: Progress = lambda *_: None,
) -> Exported:
    """Export a run or checkpoint; with `adapter`, only LoRA's adapters, in peft's format.

    `dtype` None: the dtype in which the trainer publishes. `out` None: below the run's `exports/`.

    Raises:
        ConfigError, RefusedError, PreflightError: see `find_source`, `find_model_files`, `fitted`; also if `out` is not empty.
        AsyncrlError: if the directory cannot be written. Nothing is left behind.
    """
    if out is not None:
        _check_target(out)  # fail before the whole checkpoint is read
    source = find_source(argument, runs_dir, version, progress)
    if adapter and not has_adapters(source.weights):
        raise RefusedError(f"{source.path} has whole weights, not adapters", hint="export it without --adapter")
    name = source.path.name if version is None else f"version-{version:06d}"
    name += "-adapter" if adapter else ""
    target = out or (Path(f"{source.run}-{name}") if source.run_dir is None else source.run_dir / "exports" / name)
    _check_target(target)
    chosen = dtype or source.profile.model.dtype
    if adapter:
        with _writing(target) as working:
            files, parameters, num_bytes = write_adapter(source, torch_dtype(chosen), working)
    else:
        files, parameters, num_bytes = _write_model(source, target, model, torch_dtype(chosen), max_file_bytes, progress)
    return Exported(path=target, source=source, dtype=chosen, parameters=parameters, num_bytes=num_bytes, files=files)


@contextmanager
def _writing(target: Path) -> Iterator[Path]:
    """A directory that is renamed to `target` when it is complete. Raises AsyncrlError if it cannot be written."""
    try:
        with appearing_directory(target.absolute()) as working:
            yield working
    except (OSError, SafetensorError) as error:  # safetensors raises its own error on a full disk
        why = getattr(error, "strerror", None) or str(error)
        raise AsyncrlError(f"{target} cannot be written: {why}", hint="choose another place with --out DIR") from error


def _write_model(
    source: Source, target: Path, model: Path | None, dtype: torch.dtype, max_file_bytes: int, progress: Progress
) -> tuple[tuple[str, ...], int, int]:
    """Write the directory. Returns the weight files' names, and the parameters and bytes in them. Holds one file's tensors at a
    time."""
    model_files = find_model_files(source.run_dir, source.profile, model)
    progress("reading the configuration")
    check_config(model_files)
    from asyncrl_cli.models.saved_form import SavedForm, skeleton  # imports transformers, which takes seconds: fail before

    form = SavedForm(skeleton(model_files, trust_remote_code=source.profile.model.trust_remote_code))
    weights = merged_weights(source, model) if has_adapters(source.weights) else source.weights
    sizes, read = fitted(form, weights, model_files)
    split = split_state_dict_into_shards_factory(
        sizes,
        get_storage_size=lambda elements: elements * dtype.itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_file_bytes,
    )
    num_bytes, total_mb = 0, max(sum(sizes.values()) * dtype.itemsize // MB, 1)
    with _writing(target) as working:
        copy_model_files(model_files, working, str(dtype).removeprefix("torch."))
        for name, names in split.filename_to_tensors.items():
            progress(f"writing {target.name} (MB)", num_bytes // MB, total_mb)
            cast = {name: (t.to(dtype) if t.is_floating_point() else t).contiguous() for name, t in read(names).items()}
            write_weights(cast, working / name)
            num_bytes += sum(tensor.nbytes for tensor in cast.values())
        write_index(working, split.tensor_to_filename, num_bytes)
    return tuple(split.filename_to_tensors), sum(sizes.values()), num_bytes


def _check_target(target: Path) -> None:
    if target.exists() and not target.is_dir():
        raise RefusedError(f"{target} is a file", hint="give a new or empty directory: --out DIR")
    if target.is_dir() and any(target.iterdir()):
        raise RefusedError(f"{target} exists and is not empty", hint="choose another directory with --out DIR")


def find_model_files(run_dir: Path | None, profile: Profile, given: Path | None) -> Path:
    """A directory with configuration and tokenizer. Raises ConfigError or PreflightError if there is none."""
    if given is not None:
        if missing := _missing_in(given):
            raise ConfigError(f"--model {given}: {missing}", hint=WAY_OUT)
        return given
    path, places = profile.model.path, []
    if run_dir is not None:
        newest = kept_versions(run_dir / "versions")[-1:]
        places = [run_dir / RUN_COPY, *(version_directory(run_dir / "versions", version) for version in newest)]
    if not path.startswith(BUILTIN):
        places.append(expand(path))
        if all(map(_missing_in, places)) and is_on_hub(path):
            places.append(_from_hub(profile))
    found = next((place for place in places if not _missing_in(place)), None)
    if found is None:
        missing = _missing_in(places[-1]) if places else "the checkpoint is not inside its run"
        raise PreflightError(f'configuration and tokenizer of model.path = "{path}" were not found: {missing}', hint=WAY_OUT)
    return found


def _from_hub(profile: Profile) -> Path:
    """A snapshot of the model on the hub, without its weights."""
    patterns = [pattern for pattern in HUB_PATTERNS if pattern != "*.safetensors"]
    try:
        return from_hub(profile.model.path, patterns, trust_remote_code=profile.model.trust_remote_code)
    except PreflightError as error:
        error.hint = WAY_OUT
        raise


def _missing_in(directory: Path) -> str:
    """Says what the directory lacks; "" if it has configuration and tokenizer."""
    if not directory.is_dir():
        return f"{directory} is not there"
    if not (directory / CONFIG).is_file():
        return f"{directory} holds no {CONFIG}"
    has_tokenizer = any((directory / name).is_file() for name in TOKENIZER_FILES)
    return "" if has_tokenizer else f"{directory} holds no tokenizer ({', '.join(TOKENIZER_FILES)})"


def fitted(form: SavedForm, weights: SavedWeights, model_files: Path) -> tuple[dict[str, int], Read]:
    """The number of elements of every tensor that the files will hold, in the model's order, and a function that reads tensors.

    If transformers splits or joins tensors between memory (a trainer's weights) and files (published weights), all of them are read
    and held at once, because one tensor of a file may be made of several. Raises RefusedError unless names and shapes match the
    model's parameters and persistent buffers (tied ones once).
    """
    tensors, in_files = form.memory, form.to_files(form.memory)
    is_as_in_files = weights.shapes.keys() == in_files.keys()
    _check_shapes(weights.shapes, in_files if is_as_in_files else tensors, model_files)
    if is_as_in_files or not form.converts:
        return {name: tensor.numel() for name, tensor in in_files.items()}, weights.read
    whole = form.to_files(weights.read(list(tensors)))
    return {name: tensor.numel() for name, tensor in whole.items()}, lambda names: {name: whole[name] for name in names}


def _check_shapes(shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, torch.Tensor], model_files: Path) -> None:
    expected = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    problems = {
        "missing": [name for name in expected if name not in shapes],
        "unknown": [name for name in shapes if name not in expected],
        "of another shape": [name for name in shapes if name in expected and shapes[name] != expected[name]],
    }
    found = "; ".join(f"{what}: {first_names(names)}" for what, names in problems.items() if names)
    if found:
        raise RefusedError(f"the weights do not fit {model_files / CONFIG}: {found}", hint=WAY_OUT)
