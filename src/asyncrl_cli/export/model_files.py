"""Configuration and tokenizer of an exported model, and whether the weights fit that configuration.

They are looked for in the run itself (job/run.py keeps a copy there), then where `model.path` points; weights are needed in
neither place.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl_cli.errors import ConfigError, PreflightError, RefusedError, first_line, first_names
from asyncrl_cli.models.check import TOKENIZER_FILES
from asyncrl_cli.models.resolve import BUILTIN, HUB_PATTERNS
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.safe_files import expand
from asyncrl_cli.weights.disk import kept_versions, version_directory
from asyncrl_cli.weights.model_files import CONFIG, RUN_COPY

if TYPE_CHECKING:
    import torch

    from asyncrl_cli.models.saved_form import SavedForm

WAY_OUT = "--model DIR names a directory that holds config.json and the tokenizer"


def find_model_files(run_dir: Path | None, profile: Profile, given: Path | None) -> Path:
    """A directory with configuration and tokenizer. Raises ConfigError or PreflightError if there is none."""
    if given is not None:
        if missing := _missing_in(given):
            raise ConfigError(f"--model {given}: {missing}", hint=WAY_OUT)
        return given
    path = profile.model.path
    places = []
    if run_dir is not None:
        newest = kept_versions(run_dir / "versions")[-1:]
        places = [run_dir / RUN_COPY, *(version_directory(run_dir / "versions", version) for version in newest)]
    if not path.startswith(BUILTIN):
        places.append(expand(path))
    found = next((place for place in places if not _missing_in(place)), None)
    if found is not None:
        return found
    if path.startswith((BUILTIN, ".", "/", "~")) or places[-1].exists() or path.count("/") > 1:
        raise _gone(path, _missing_in(places[-1]) if places else "the checkpoint lies outside of its run")
    return _from_hub(path, trust_remote_code=profile.model.trust_remote_code)


def _missing_in(directory: Path) -> str:
    """What the directory lacks; "" if configuration and tokenizer are there."""
    if not directory.is_dir():
        return f"{directory} is not there"
    if not (directory / CONFIG).is_file():
        return f"{directory} holds no {CONFIG}"
    has_tokenizer = any((directory / name).is_file() for name in TOKENIZER_FILES)
    return "" if has_tokenizer else f"{directory} holds no tokenizer ({', '.join(TOKENIZER_FILES)})"


def check_fit(form: SavedForm, shapes: Mapping[str, tuple[int, ...]], model_files: Path) -> tuple[dict[str, torch.Tensor], bool]:
    """Names and shapes in the model's order, and whether they are as in its files (published weights), not as in memory (a
    trainer's).

    RefusedError unless they are those of its parameters and persistent buffers, tied ones once."""
    in_memory = form.memory
    in_files = form.to_files(in_memory)
    is_as_in_files = shapes.keys() == in_files.keys()
    tensors = in_files if is_as_in_files else in_memory
    expected = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    problems = {
        "missing": [name for name in expected if name not in shapes],
        "unknown": [name for name in shapes if name not in expected],
        "of another shape": [name for name in shapes if name in expected and shapes[name] != expected[name]],
    }
    found = "; ".join(f"{what}: {first_names(names)}" for what, names in problems.items() if names)
    if found:
        raise RefusedError(f"the weights do not fit {model_files / CONFIG}: {found}", hint=WAY_OUT)
    return tensors, is_as_in_files


def _from_hub(name: str, *, trust_remote_code: bool) -> Path:
    """Its snapshot here if there is one, else the hub is asked, for everything but weights."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = [p for p in HUB_PATTERNS if p != "*.safetensors" and (trust_remote_code or p != "*.py")]
    try:
        try:
            directory = Path(snapshot_download(name, allow_patterns=patterns, local_files_only=True))
        except LocalEntryNotFoundError:
            directory = Path(snapshot_download(name, allow_patterns=patterns))
    except (HFValidationError, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise _gone(name, f"the hub cannot be asked: {first_line(error)}") from error
    if missing := _missing_in(directory):
        raise _gone(name, missing)
    return directory


def _gone(path: str, why: str) -> PreflightError:
    return PreflightError(f'configuration and tokenizer of model.path = "{path}" are gone: {why}', hint=WAY_OUT)
