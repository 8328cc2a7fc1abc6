"""Resolves `model.path` to a local Hugging Face directory: an existing one, a snapshot from the hub, or
builtin:tiny.

builtin:tiny is built once and cached. Its directory is named by a hash of all inputs, and is either complete
or absent.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from asyncrl_cli.base.errors import ConfigError, PreflightError, first_line
from asyncrl_cli.base.paths import expand, missing_hint
from asyncrl_cli.base.safe_files import load_json
from asyncrl_cli.base.storage import appearing_directory, naming, storage_error
from asyncrl_cli.builtin.tiny import (
    MAX_POSITIONS,
    TAUGHT,
    UNTAUGHT,
    Course,
    Lesson,
    Recipe,
    Taught,
    characters_of,
    make_lessons,
    taught_response,
    tiny_model,
    tiny_sizes,
    tiny_tokenizer,
)
from asyncrl_cli.builtin.tiny_chat import CHARACTERS, CHAT_TEMPLATE, chat_tokenizer, taught_conversation
from asyncrl_cli.models.chat_templates import with_template
from asyncrl_cli.models.inspection import check_model_directory, check_positions, refused
from asyncrl_cli.profile.schema import Profile

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BUILTIN, REWARD_MODEL = "builtin:", "reward_model"
TOKENIZER_PATTERNS = [
    "*token*",
    "*vocab*",
    "merges.txt",
    "*.model",
    "*.jinja",
    "config.json",
    "generation_config.json",
    "*.py",
]
HUB_PATTERNS = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"]
RECIPE_VERSION = 3
"""Increase this when a code change makes the same inputs give another model."""

DESCRIPTION = "asyncrl-recipe.json"
PHASE = "warm start"
SHOWN_LOSSES = 20
"""The displayed loss is a mean over this many steps, because batches of short texts have lower losses than
those of long ones."""

Progress = Callable[[str, int, int, str], None]
"""Called with (name of the phase, steps done, total steps, text to show beside them)."""


def resolve_model(profile: Profile, task: Course, *, progress: Progress = lambda *_: None) -> Path:
    """A directory from which AutoModelForCausalLM and AutoTokenizer load without the network.

    Raises ConfigError for an unknown built-in model, PreflightError if the model is missing or incomplete.
    """
    if not is_builtin(profile):
        return _pretrained(profile)
    model_here(profile)  # raises for an unknown built-in model
    return (
        built_untaught(profile)
        if profile.model.path == UNTAUGHT
        else built_tiny(profile, task, progress=progress)
    )


def _pretrained(profile: Profile) -> Path:
    if (directory := model_here(profile)) is None:
        directory = from_hub(
            profile.model.path, HUB_PATTERNS, trust_remote_code=profile.model.trust_remote_code
        )
        check_model_directory(directory)
        directory = _templated(profile, directory)
    return directory


def _templated(profile: Profile, directory: Path) -> Path:
    return with_template(directory, profile.model.chat_template, _cache_directory(profile))


def tokenizer_here(profile: Profile) -> Path | None:
    """A local directory with the model's tokenizer, which may lack the weights; None if there is none."""
    local = expand(profile.model.path)
    has_tokenizer = not is_builtin(profile) and (local / "tokenizer_config.json").is_file()
    return _templated(profile, local.resolve()) if has_tokenizer else None


def fetched_tokenizer(profile: Profile) -> Path:
    """The same for a model on the hub, of which only the tokenizer is downloaded. Raises PreflightError."""
    trusts = profile.model.trust_remote_code
    return _templated(profile, from_hub(profile.model.path, TOKENIZER_PATTERNS, trust_remote_code=trusts))


def further_models(profile: Profile, model_dir: Path) -> dict[str, str]:
    """Directories of the reference, the critic and the reward model, if the run has them, by their names in
    `ProcessPlace`. A model whose path is not set in the profile uses the policy's directory, `model_dir`.

    Raises PreflightError if one is missing or incomplete, or lacks some of the policy's tokens. Only a reward
    model, which has its own tokenizer, may lack them.
    """
    algorithm, rewards = profile.algorithm, profile.reward_model.path is not None
    wanted = {"ref": algorithm.has_reference, "critic": algorithm.has_critic, REWARD_MODEL: rewards}
    sections = [section for section, is_wanted in wanted.items() if is_wanted]
    return {
        f"{section}_dir": str(_further_model(profile, section, model_dir).absolute()) for section in sections
    }


def _further_model(profile: Profile, section: str, model_dir: Path) -> Path:
    path, key = getattr(profile, section).path, f"{section}.path"
    if path is None:
        return model_dir
    other = profile.model_copy(
        update={"model": profile.model.model_copy(update={"path": path, "chat_template": None})}
    )
    try:
        if is_builtin(other):
            then = "" if section == REWARD_MODEL else " to use the run's initial model"
            raise refused("it must be a directory or a hub name", f"leave out {key}{then}")
        directory = _pretrained(other)
        own, theirs = map(_vocabulary, (model_dir, directory))
        if own > theirs and section != REWARD_MODEL:
            raise refused(
                f"{directory} has {theirs} tokens, the policy {own}", "use a model of the policy's family"
            )
    except PreflightError as error:
        raise PreflightError(error.message.replace("model.path", key, 1), hint=error.hint) from error
    return directory


def _vocabulary(directory: Path) -> int:
    config = load_json(directory / "config.json", dict[str, Any], error=PreflightError)
    return int((config.get("text_config") or config).get("vocab_size", 0))


def is_builtin(profile: Profile) -> bool:
    return profile.model.path.startswith(BUILTIN)


def model_here(profile: Profile) -> Path | None:
    """The directory that `model.path` names; None if it has to be made or fetched. Raises as `resolve_model`
    does."""
    path = profile.model.path
    if is_builtin(profile):
        if path not in (TAUGHT, UNTAUGHT):
            raise ConfigError(
                f'model.path: there is no "{path}"',
                hint=f'the built-in models are "{TAUGHT}" and "{UNTAUGHT}"',
            )
        check_positions(profile, MAX_POSITIONS)
        return None
    local = expand(path)
    if os.path.isdir(local):
        check_model_directory(local)
        return _templated(profile, local.resolve())
    if os.path.exists(local):
        raise refused(f"{path} is a file", "name the directory that holds config.json")
    if looks_like_a_path(path):
        raise refused(f"directory {path} does not exist", missing_hint(local))
    return None


def looks_like_a_path(path: str) -> bool:
    """A hub name is `name` or `owner/name`, of letters, digits, dots, dashes and underscores."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or path.endswith("/") or "\\" in path


def is_on_hub(path: str) -> bool:
    """Whether a model's path is a hub name: neither a built-in model nor a local path."""
    return not (path.startswith(BUILTIN) or looks_like_a_path(path) or os.path.exists(path))


def fetch_config(profile: Profile) -> None:
    """Download the config.json of a model on the hub (a few kB), for `shape_of`. Does nothing for other
    models.

    Raises PreflightError if the hub has no such model or cannot be reached.
    """
    path = profile.model.path
    if is_on_hub(path):
        from_hub(path, ["config.json"], trust_remote_code=False)


def from_hub(name: str, patterns: Sequence[str], *, trust_remote_code: bool) -> Path:
    """A local snapshot of these files of a model on the hub; code files only if they may be run. Raises
    PreflightError."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    wanted = [pattern for pattern in patterns if trust_remote_code or pattern != "*.py"]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except GatedRepoError as error:
        raise refused(f"the hub gives {name} only to users who have logged in", "hf auth login") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        hint = 'a hub name is like "Qwen/Qwen3-0.6B"'
        raise refused(f'"{name}" is neither a directory here nor a model on the hub', hint) from error
    except OSError as error:  # huggingface_hub's own errors derive from OSError, too
        why = f'"{name}" is not a directory here, and the hub cannot be reached: {first_line(error)}'
        raise refused(why, "check the name and the network, or give the path of a local directory") from error


def built_tiny(profile: Profile, task: Course, *, progress: Progress = lambda *_: None) -> Path:
    """The directory of this profile's warm-started model, built unless it is in the cache. `progress` is
    called in either case."""
    recipe, seed = Recipe(steps=profile.model.warm_start_steps), profile.run.seed
    num_lessons = recipe.steps * recipe.batch_size
    lessons = make_lessons(task, num=num_lessons, label_noise=profile.model.warm_start_label_noise, seed=seed)
    description = _describe(recipe, task, lessons, seed)
    directory = _cache_directory(profile) / f"tiny-{_digest(description)[:16]}"
    if (directory / DESCRIPTION).is_file():
        progress(f"cached model {directory}", 0, 0, "")
        return directory
    # imported late: a cached model needs no torch, which takes seconds
    from asyncrl_cli.builtin.warm_start import warm_start

    tokenizer, taught = _written(task, lessons)
    model = tiny_model(len(tokenizer), seed=seed)

    def report(losses: Sequence[float]) -> None:
        progress(PHASE, len(losses), recipe.steps, f"loss {fmean(losses[-SHOWN_LOSSES:]):.2f}")

    losses = warm_start(model, taught, recipe, seed=seed, progress=report)
    _save(directory, model, tokenizer, {**description, "losses": [round(loss, 4) for loss in losses]})
    return directory


def built_untaught(profile: Profile) -> Path:
    """The directory of a model of builtin:tiny's size with random weights and the tokenizer for
    conversations, made unless cached. Its responses are noise, but it works with any task, so a task can be
    tried without a network."""
    seed, tokenizer = profile.run.seed, chat_tokenizer(())
    description = {
        "config": tiny_sizes(len(tokenizer)),
        "seed": seed,
        "chat_template": CHAT_TEMPLATE,
    } | _versions()
    directory = _cache_directory(profile) / f"untaught-{_digest(description)[:16]}"
    if not (directory / DESCRIPTION).is_file():
        _save(directory, tiny_model(len(tokenizer), seed=seed), tokenizer, description)
    return directory


def _cache_directory(profile: Profile) -> Path:
    """`model.cache_dir`, else `asyncrl/models` in the user's cache directory."""
    if profile.model.cache_dir is not None:
        return expand(profile.model.cache_dir).resolve()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return expand(base) / "asyncrl" / "models"


def _written(task: Course, lessons: Sequence[Lesson]) -> tuple[Any, list[Taught]]:
    """The task's tokenizer, and its lessons in tokens."""
    if task.words is not None:
        tokenizer = chat_tokenizer(task.words)
        return tokenizer, [taught_conversation(tokenizer, lesson.response) for lesson in lessons]
    tokenizer = tiny_tokenizer(characters_of(task, lessons))
    return tokenizer, [taught_response(tokenizer, lesson) for lesson in lessons]


def _describe(recipe: Recipe, task: Course, lessons: Sequence[Lesson], seed: int) -> dict[str, Any]:
    """Everything that the weights depend on, including library versions: another torch may draw other random
    numbers."""
    chat: dict[str, Any] = {} if task.words is None else {"words": task.words, "chat_template": CHAT_TEMPLATE}
    characters = characters_of(task, lessons) if task.words is None else CHARACTERS
    return {
        "recipe_version": RECIPE_VERSION,
        "config": tiny_sizes(len(characters)),
        "characters": "".join(characters),
        "recipe": asdict(recipe),
        "lessons": _digest(lessons),
        "seed": seed,
        **_versions(),
        **chat,
    }


def _versions() -> dict[str, str]:
    return {"torch": version("torch"), "transformers": version("transformers")}


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


def _save(directory: Path, model: PreTrainedModel, tokenizer: Any, description: Mapping[str, Any]) -> None:
    """Write the model to the cache. Raises PreflightError, which names the key `model.cache_dir`, if that
    fails."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        with appearing_directory(directory) as working, naming(working):
            model.save_pretrained(working)
            tokenizer.save_pretrained(working)
            (working / DESCRIPTION).write_text(
                json.dumps(description, indent=1, default=str), encoding="utf-8"
            )
    except OSError as error:
        if (directory / DESCRIPTION).is_file():  # another run built the same model meanwhile: keep its copy
            return
        why = f"model.cache_dir: {storage_error(error).message}"
        raise PreflightError(why, hint="set model.cache_dir to a directory that you can write to") from error
