"""`asyncrl export`, as a function: find and verify the weights, check them against the configuration, write
the directory.

source.py: find_source ──> find_model_files ──> tensors.py: files of at most `max_file_bytes` ──> Exported

Configuration and tokenizer are looked for in the run itself, which keeps a copy, then where `model.path`
points; neither place needs to hold weights. The directory is written under a hidden name, flushed and
renamed: it is complete or absent. What can be refused is refused before torch and transformers are imported,
which takes ten seconds; a refusal lists what exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from asyncrl_cli.base.errors import ConfigError, PreflightError, RefusedError
from asyncrl_cli.base.paths import expand
from asyncrl_cli.export.source import Progress, Source, find_source
from asyncrl_cli.models.model_directory import BUILTIN, HUB_PATTERNS, from_hub, is_on_hub
from asyncrl_cli.models.model_files import CONFIG, RUN_COPY, TOKENIZER_FILES, check_config
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.weights.versions import VERSIONS, kept_versions, version_directory

WAY_OUT = "give a directory with config.json and the tokenizer: --model DIR"
Dtype = Literal["float32", "bfloat16"]


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
        ConfigError, RefusedError, PreflightError: see `find_source`, `find_model_files`, `write_model`; also
        if `out` is not empty. AsyncrlError: if the directory cannot be written. Nothing is left behind.
    """
    if out is not None:
        _check_target(out)  # fail before the whole checkpoint is read
    source = find_source(argument, runs_dir, version, progress)
    if adapter and not source.has_adapters:
        hint = "export it without --adapter"
        raise RefusedError(f"{source.path} has whole weights, not adapters", hint=hint)
    name = source.path.name if version is None else f"version-{version:06d}"
    name += "-adapter" if adapter else ""
    target = out or (
        Path(f"{source.run}-{name}") if source.run_dir is None else source.run_dir / "exports" / name
    )
    _check_target(target)
    chosen = dtype or source.profile.model.dtype
    model_files = None if adapter else find_model_files(source.run_dir, source.profile, model)
    if model_files is not None:
        check_config(model_files)
    progress("reading the configuration")
    from asyncrl_cli.export.tensors import write_adapter, write_model

    if model_files is None:
        written = write_adapter(source, target, chosen)
    else:
        written = write_model(source, target, model_files, model, chosen, max_file_bytes, progress)
    return Exported(path=target.absolute(), source=source, dtype=chosen, **written._asdict())


def _check_target(target: Path) -> None:
    if target.exists() and not target.is_dir():
        raise RefusedError(f"{target} is a file", hint="give a new or empty directory: --out DIR")
    if target.is_dir() and any(target.iterdir()):
        hint = "choose another directory with --out DIR"
        raise RefusedError(f"{target} exists and is not empty", hint=hint)


def find_model_files(run_dir: Path | None, profile: Profile, given: Path | None) -> Path:
    """A directory with configuration and tokenizer. Raises ConfigError or PreflightError if there is none."""
    if given is not None:
        if missing := _missing_in(given):
            raise ConfigError(f"--model {given}: {missing}", hint=WAY_OUT)
        return given
    path, places = profile.model.path, []
    if run_dir is not None:
        newest = kept_versions(run_dir / VERSIONS)[-1:]
        places = [run_dir / RUN_COPY, *(version_directory(run_dir / VERSIONS, version) for version in newest)]
    if not path.startswith(BUILTIN):
        places.append(expand(path))
        if all(map(_missing_in, places)) and is_on_hub(path):
            patterns = [pattern for pattern in HUB_PATTERNS if pattern != "*.safetensors"]
            try:
                places.append(from_hub(path, patterns, trust_remote_code=profile.model.trust_remote_code))
            except PreflightError as error:
                error.hint = WAY_OUT
                raise
    found = next((place for place in places if not _missing_in(place)), None)
    if found is None:
        missing = _missing_in(places[-1]) if places else "the checkpoint is not inside its run"
        why = f'configuration and tokenizer of model.path = "{path}" were not found: {missing}'
        raise PreflightError(why, hint=WAY_OUT)
    return found


def _missing_in(directory: Path) -> str:
    """Says what the directory lacks; "" if it has configuration and tokenizer."""
    if not directory.is_dir():
        return f"{directory} is not there"
    if not (directory / CONFIG).is_file():
        return f"{directory} holds no {CONFIG}"
    has_tokenizer = any((directory / name).is_file() for name in TOKENIZER_FILES)
    return "" if has_tokenizer else f"{directory} holds no tokenizer ({', '.join(TOKENIZER_FILES)})"
