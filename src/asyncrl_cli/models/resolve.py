"""`model.path` -> a local Hugging Face directory: one that is there, a snapshot from the hub, or builtin:tiny."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl_cli.errors import ConfigError, first_line
from asyncrl_cli.models.check import check_model_directory, check_positions, refused
from asyncrl_cli.models.tiny import MAX_POSITIONS, Course
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.safe_files import expand

if TYPE_CHECKING:
    from asyncrl_cli.models.build import Progress

BUILTIN = "builtin:"
HUB_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]


def resolve_model(profile: Profile, task: Course, *, progress: Progress = lambda *_: None) -> Path:
    """A directory from which AutoModelForCausalLM and AutoTokenizer load without the network.

    Raises ConfigError if there is no such builtin, PreflightError if the model is not there or not whole.
    """
    directory = model_here(profile)
    if directory is not None:
        return directory
    if is_builtin(profile):
        from asyncrl_cli.models.build import built_tiny

        return built_tiny(profile, task, progress=progress)
    return _from_hub(profile.model.path, trust_remote_code=profile.model.trust_remote_code)


def is_builtin(profile: Profile) -> bool:
    return profile.model.path.startswith(BUILTIN)


def model_here(profile: Profile) -> Path | None:
    """The directory that `model.path` names; None if it has to be made or fetched. Raises as `resolve_model` does."""
    path = profile.model.path
    if is_builtin(profile):
        if path != "builtin:tiny":
            raise ConfigError(f'model.path: there is no "{path}"', hint='the only built-in model is "builtin:tiny"')
        check_positions(profile, MAX_POSITIONS)
        return None
    local = expand(path)
    if os.path.isdir(local):
        check_model_directory(local)
        return local.resolve()
    if os.path.exists(local):
        raise refused(f"{path} is a file", "name the directory that holds config.json")
    if _looks_like_a_path(path):
        raise refused(f"directory {path} does not exist", f"paths are relative to {Path.cwd()}")
    return None


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
        raise refused(f"the hub gives {name} only to users who have logged in", "hf auth login") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        hint = 'a hub name is like "Qwen/Qwen3-0.6B"'
        raise refused(f'"{name}" is neither a directory here nor a model on the hub', hint) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        why = f'"{name}" is not a directory here, and the hub cannot be asked for it: {first_line(error)}'
        raise refused(why, "check the name and the network, or give the path of a local directory") from error
    check_model_directory(directory)
    return directory
