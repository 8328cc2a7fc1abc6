"""`model.path` -> a local Hugging Face directory: one that is there, a snapshot from the hub, or builtin:tiny."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NotRequired, TypeVar

from annotated_types import Interval
from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from asyncrl_cli.errors import ConfigError, PreflightError, first_line
from asyncrl_cli.models.check import check_positions
from asyncrl_cli.models.lessons import Course
from asyncrl_cli.models.shape import tensor_shapes
from asyncrl_cli.models.tiny import MAX_POSITIONS
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.safe_files import expand, load_json

if TYPE_CHECKING:
    from asyncrl_cli.models.build import Progress

T = TypeVar("T")
BUILTIN = "builtin:"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
WEIGHTS = "model.safetensors"
HUB_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]


class _Sizes(TypedDict):
    """transformers makes a list of as many entries as there are layers."""

    num_hidden_layers: NotRequired[Annotated[int, Interval(ge=1, le=100_000)] | None]


class _Config(_Sizes):
    """What is read here of config.json; the rest is its model's."""

    model_type: NotRequired[str | None]
    text_config: NotRequired[_Sizes | None]


class _Index(TypedDict):
    weight_map: dict[str, str]


def resolve_model(profile: Profile, task: Course, *, progress: Progress = lambda *_: None) -> Path:
    """A directory from which AutoModelForCausalLM and AutoTokenizer load without the network.

    Raises ConfigError if there is no such builtin, PreflightError if the model is not there or not whole.
    """
    directory = model_here(profile)
    if directory is not None:
        return directory
    if profile.model.path.startswith(BUILTIN):
        from asyncrl_cli.models.build import built_tiny

        return built_tiny(profile, task, progress=progress)
    return _from_hub(profile.model.path, trust_remote_code=profile.model.trust_remote_code)


def model_here(profile: Profile) -> Path | None:
    """The directory that `model.path` names; None if it has to be made or fetched. Raises as `resolve_model` does."""
    path = profile.model.path
    if path.startswith(BUILTIN):
        if path != "builtin:tiny":
            raise ConfigError(f'model.path: there is no "{path}"', hint='the only built-in model is "builtin:tiny"')
        check_positions(profile, MAX_POSITIONS)
        return None
    local = expand(path)
    if os.path.isdir(local):
        check_model_directory(local)
        return local.resolve()
    if os.path.exists(local):
        raise PreflightError(f"model.path: {path} is a file", hint="name the directory that holds config.json")
    if _looks_like_a_path(path):
        raise PreflightError(f"model.path: directory {path} does not exist", hint=f"paths are relative to {Path.cwd()}")
    return None


def check_model_directory(directory: Path) -> None:
    """PreflightError naming what is missing or damaged: configuration, weights (every shard), tokenizer."""
    check_config(directory)
    for name in (*TOKENIZER_FILES, *TOKENIZER_SETTINGS):
        if os.path.lexists(directory / name) and not os.path.isfile(directory / name):
            raise PreflightError(f"model.path: {directory / name} is no file", hint="copy or download it again")
    _check_weights(directory)
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise PreflightError(
            f"model.path: {directory} holds no tokenizer ({', '.join(TOKENIZER_FILES)})",
            hint=f"save one beside the weights: tokenizer.save_pretrained({str(directory)!r})",
        )


def check_config(directory: Path) -> None:
    """PreflightError for a config.json that transformers must not be given."""
    if not _read_json(directory / "config.json", _Config).get("model_type"):
        raise PreflightError(f"model.path: {directory}/config.json names no model_type", hint="save the model with save_pretrained")


def _check_weights(directory: Path) -> None:
    index = directory / f"{WEIGHTS}.index.json"
    indexed = _read_json(index, _Index)["weight_map"] if os.path.lexists(index) else {"": WEIGHTS}
    wanted = sorted(set(indexed.values()))
    missing = [name for name in wanted if Path(name).name != name or not os.path.isfile(directory / name)]
    if not wanted or missing:
        what = f"{missing[0]} is missing" if missing else f"{index.name} names no file"
        raise PreflightError(
            f"model.path: {directory} holds no weights: {what}",
            hint="asyncrl reads safetensors: model.save_pretrained(directory) writes them",
        )
    for name in wanted:
        if not tensor_shapes(directory / name):
            raise PreflightError(f"model.path: {directory / name} holds no tensors", hint="copy or download it again")


def _read_json(path: Path, kind: type[T]) -> T:
    if not os.path.lexists(path):
        raise PreflightError(f"model.path: {path.parent} holds no {path.name}", hint="name a directory written by save_pretrained")
    try:
        return load_json(path, kind, error=PreflightError, hint="copy or download it again")
    except PreflightError as error:
        raise PreflightError(f"model.path: {error.message}", hint=error.hint) from None


def _looks_like_a_path(path: str) -> bool:
    """A hub name is `name` or `owner/name`, of letters, digits, dots, dashes and underscores."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or path.endswith("/") or "\\" in path


def _from_hub(name: str, *, trust_remote_code: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    patterns = HUB_PATTERNS if trust_remote_code else [pattern for pattern in HUB_PATTERNS if pattern != "*.py"]
    try:
        directory = Path(snapshot_download(name, allow_patterns=patterns))
    except GatedRepoError as error:
        raise PreflightError(f"model.path: the hub wants to know who asks for {name}", hint="hf auth login") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise PreflightError(
            f'model.path: "{name}" is neither a directory here nor a model on the hub',
            hint='a hub name is like "Qwen/Qwen3-0.6B"',
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise PreflightError(
            f'model.path: "{name}" is not a directory here, and the hub cannot be asked for it: {first_line(error)}',
            hint="check the name and the network, or give the path of a local directory",
        ) from error
    check_model_directory(directory)
    return directory
