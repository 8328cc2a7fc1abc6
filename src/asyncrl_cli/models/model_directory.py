"""From `model.path` to a local Hugging Face directory, which is complete and has the chosen chat template.

    builtin:tiny, builtin:untaught   built once, then cached (builtin/tiny_models.py)
    a directory                      checked (model_files.py)
    a .gguf file                     converted once, then cached (gguf_file.py)
    a name on the hub                a snapshot of it, checked
    model.chat_template              a directory in the cache, with that template and links to the files

`builtin:tools` lets a model whose own template knows no tools be offered tools: tools.jinja turns tools,
calls and results into text of ordinary messages, in the form of Hermes and Qwen, and leaves the rest to the
model's own template:

    tools              described before the system message, or before the first user message
    assistant's calls  <tool_call>{"name": ..., "arguments": {...}}</tool_call>
    results            <tool_response>...</tool_response> in a user message
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NotRequired

from typing_extensions import TypedDict

from asyncrl_cli.base.errors import ConfigError, PreflightError, first_line
from asyncrl_cli.base.paths import expand, missing_hint
from asyncrl_cli.base.safe_files import MIB, load_json, read_text, reason
from asyncrl_cli.base.storage import appearing_directory
from asyncrl_cli.builtin.tiny import MAX_POSITIONS, TAUGHT, UNTAUGHT, Course
from asyncrl_cli.builtin.tiny_models import Progress, built_tiny, built_untaught
from asyncrl_cli.models.gguf_file import SUFFIX, check_gguf, converted, converted_directory, gguf_file
from asyncrl_cli.models.model_files import check_model_directory, check_positions, refused
from asyncrl_cli.profile.schema import Profile

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
TOOLS = "builtin:tools"
TEMPLATE, SETTINGS = "chat_template.jinja", "tokenizer_config.json"
REPLACED = (TEMPLATE, "chat_template.json", SETTINGS)
CHATML = """{%- for message in messages -%}
    {{- "<|im_start|>" + message.role + "\\n" + message.content + eos_token + "\\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\\n" -}}{%- endif -%}
"""
"""For a model that has no template."""


class _Vocabulary(TypedDict):
    vocab_size: NotRequired[int]


class _Config(_Vocabulary):
    text_config: NotRequired[_Vocabulary | None]


def resolve_model(profile: Profile, task: Course, *, progress: Progress = lambda *_: None) -> Path:
    """A directory from which AutoModelForCausalLM and AutoTokenizer load without the network.

    Raises ConfigError for an unknown built-in model, PreflightError if the model is missing or incomplete.
    """
    if (directory := model_here(profile)) is not None:
        return directory
    if profile.model.path == UNTAUGHT:
        return built_untaught(profile, cache_directory(profile))
    if profile.model.path == TAUGHT:
        return built_tiny(profile, task, cache_directory(profile), progress=progress)
    return _fetched(profile, progress)


def model_here(profile: Profile) -> Path | None:
    """The directory that `model.path` names; None if it has to be made or fetched. Raises as `resolve_model`
    does."""
    path = profile.model.path
    if is_builtin(profile):
        if path not in (TAUGHT, UNTAUGHT):
            hint = f'the built-in models are "{TAUGHT}" and "{UNTAUGHT}"'
            raise ConfigError(f'model.path: there is no "{path}"', hint=hint)
        check_positions(profile, MAX_POSITIONS)
        return None
    if (file := gguf_file(path)) is not None:
        directory = converted_directory(file, cache_directory(profile))
        if directory.is_dir():
            return _templated(profile, directory)
        check_gguf(file)
        return None
    local = expand(path)
    if os.path.isdir(local):
        check_model_directory(local)
        return _templated(profile, local.resolve())
    if os.path.exists(local):
        raise refused(f"{path} is a file", "name the directory that holds config.json, or a .gguf file")
    if looks_like_a_path(path):
        raise refused(f"directory {path} does not exist", missing_hint(local))
    return None


def _fetched(profile: Profile, progress: Progress = lambda *_: None) -> Path:
    """A model that is not in a directory yet: converted, or downloaded."""
    if (file := gguf_file(profile.model.path)) is not None:
        directory = converted(file, cache_directory(profile), progress)
    else:
        trusts = profile.model.trust_remote_code
        directory = from_hub(profile.model.path, HUB_PATTERNS, trust_remote_code=trusts)
    check_model_directory(directory)
    return _templated(profile, directory)


def tokenizer_here(profile: Profile) -> Path | None:
    """A local directory with the model's tokenizer, which may lack the weights; None if there is none."""
    file = gguf_file(profile.model.path)
    converted_to = None if file is None else converted_directory(file, cache_directory(profile))
    local = converted_to or expand(profile.model.path)
    has_tokenizer = not is_builtin(profile) and (local / SETTINGS).is_file()
    return _templated(profile, local.resolve()) if has_tokenizer else None


def fetched_tokenizer(profile: Profile) -> Path:
    """The same for a model on the hub, of which only the tokenizer is downloaded, and for a GGUF file, which
    is converted as a whole. Raises PreflightError."""
    if gguf_file(profile.model.path) is not None:
        return _fetched(profile)
    trusts = profile.model.trust_remote_code
    return _templated(profile, from_hub(profile.model.path, TOKENIZER_PATTERNS, trust_remote_code=trusts))


def further_models(profile: Profile, model_dir: Path) -> dict[str, Any]:
    """Directories of the reference, the teachers, the critic and the reward model, if the run has them, by
    their names in `ProcessPlace`. A model whose path is not set in the profile uses the policy's directory,
    `model_dir`.

    Raises PreflightError if one is missing or incomplete, or lacks some of the policy's tokens. Only a reward
    model, which has its own tokenizer, may lack them.
    """
    found: dict[str, Any] = {}
    for section in _sections(profile):
        path, key = getattr(profile, section).path, f"{section}.path"
        directory = model_dir if path is None else _further(profile, model_dir, key, path)
        found[f"{section}_dir"] = str(directory.absolute())
    if teachers := profile.teacher.paths.items():
        found["teacher_dirs"] = {
            name: str(_further(profile, model_dir, teacher_key(name), path).absolute())
            for name, path in teachers
        }
    return found


def further_here(profile: Profile, *, is_elsewhere: bool = False) -> dict[str, Path]:
    """The further models that the profile names and that are on this machine, by the keys of their paths.
    Raises as `further_models` does for local paths that cannot be used. `is_elsewhere`: the run is, and paths
    may exist there only."""
    named = {f"{section}.path": getattr(profile, section).path for section in _sections(profile)}
    named |= {teacher_key(name): path for name, path in profile.teacher.paths.items()}
    found = dict[str, Path]()
    for key, path in named.items():
        with naming_key(key):
            if path is None or (is_elsewhere and not os.path.exists(expand(path))):
                continue
            if (directory := model_here(_as_model(profile, key, path))) is not None:
                found[key] = directory
    return found


def _sections(profile: Profile) -> list[str]:
    """The sections of the further models, besides teachers, that the run has."""
    algorithm, rewards = profile.algorithm, profile.reward_model.path is not None
    wanted = {"ref": algorithm.has_reference, "critic": algorithm.has_critic, REWARD_MODEL: rewards}
    return [section for section, is_wanted in wanted.items() if is_wanted]


def teacher_key(name: str) -> str:
    """Names a teacher in messages."""
    return f"teacher.path.{name}" if name else "teacher.path"


@contextmanager
def naming_key(key: str) -> Iterator[None]:
    """Errors about a further model name the key of its path instead of `model.path`, as checks of any model
    do."""
    try:
        yield
    except PreflightError as error:
        raise PreflightError(error.message.replace("model.path", key, 1), hint=error.hint) from error


def _as_model(profile: Profile, key: str, path: str) -> Profile:
    """The profile with a further model's path as that of the model. Raises PreflightError for a built-in
    one."""
    model = profile.model.model_copy(update={"path": path, "chat_template": None})
    other = profile.model_copy(update={"model": model})
    if is_builtin(other):
        then = "" if key.startswith((REWARD_MODEL, "teacher")) else " to use the run's initial model"
        raise PreflightError(f"{key}: it must be a directory or a hub name", hint=f"leave out {key}{then}")
    return other


def _further(profile: Profile, model_dir: Path, key: str, path: str) -> Path:
    other, is_judge = _as_model(profile, key, path), key.startswith(REWARD_MODEL)
    with naming_key(key):
        directory = model_here(other) or _fetched(other)
    files = [one / "config.json" for one in (model_dir, directory)]
    configs = [load_json(file, _Config, error=PreflightError) for file in files]
    texts = [config.get("text_config") or config for config in configs]
    policys, found = (int(text.get("vocab_size", 0)) for text in texts)
    if policys > found and not is_judge:
        hint = "use a model of the policy's family"
        raise PreflightError(f"{key}: {directory} has {found} tokens, the policy {policys}", hint=hint)
    return directory


def is_builtin(profile: Profile) -> bool:
    return profile.model.path.startswith(BUILTIN)


def looks_like_a_path(path: str) -> bool:
    """A hub name is `name` or `owner/name`, of letters, digits, dots, dashes and underscores."""
    return path.startswith((".", "/", "~")) or path.count("/") > 1 or path.endswith("/") or "\\" in path


def is_on_hub(path: str) -> bool:
    """Whether a model's path is a hub name: neither a built-in model nor a local path or GGUF file."""
    is_local = path.startswith(BUILTIN) or path.endswith(SUFFIX) or looks_like_a_path(path)
    return not (is_local or os.path.exists(path))


def from_hub(name: str, patterns: Sequence[str], *, trust_remote_code: bool) -> Path:
    """A local snapshot of these files of a model on the hub; code files only if they may be run. Raises
    PreflightError if the hub has no such model or cannot be reached."""
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


def cache_directory(profile: Profile) -> Path:
    """`model.cache_dir`, else `asyncrl/models` in the user's cache directory."""
    if profile.model.cache_dir is not None:
        return expand(profile.model.cache_dir).resolve()
    return expand(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "asyncrl" / "models"


def _templated(profile: Profile, directory: Path) -> Path:
    return with_template(directory, profile.model.chat_template, cache_directory(profile))


def with_template(directory: Path, chosen: str | None, cache: Path) -> Path:
    """The model's directory, or one in `cache` that has the template `chosen` (TOOLS or a file) and links to
    the model's files.

    Raises ConfigError or PreflightError, which name the key.
    """
    if chosen is None:
        return directory
    settings: dict[str, Any] = {}
    if (directory / SETTINGS).exists():
        settings = load_json(directory / SETTINGS, dict[str, Any], error=PreflightError)
    if chosen == TOOLS:
        own = settings.get("chat_template")
        if (directory / TEMPLATE).exists():
            own = read_text(directory / TEMPLATE, max_bytes=MIB)
        elif isinstance(own, list):  # several with names
            named = (one for one in own if isinstance(one, dict) and one.get("name") == "default")
            own = next((one.get("template") for one in named), None)
        tools = (Path(__file__).parent / "tools.jinja").read_text(encoding="utf-8")
        template = tools + (own if isinstance(own, str) else CHATML)
    elif chosen.startswith(BUILTIN):
        hint = f'"{TOOLS}", or the path of a Jinja file'
        raise ConfigError(f'model.chat_template: there is no "{chosen:.80}"', hint=hint)
    else:
        path = expand(chosen)
        try:
            template = read_text(path, max_bytes=MIB)
        except FileNotFoundError:
            why = f"model.chat_template: {path} does not exist"
            raise ConfigError(why, hint=missing_hint(path)) from None
        except (OSError, ValueError) as error:
            why = f"model.chat_template: {path!s:.300} cannot be read: {reason(error)}"
            raise ConfigError(why, hint=f'name a Jinja file, or "{TOOLS}"') from None
    # The template that reads answers belongs to the replaced one.
    rest = {key: settings[key] for key in settings if key not in ("chat_template", "response_template")}
    visible = (path for path in directory.iterdir() if not path.name.startswith("."))
    files = sorted(path for path in visible if path.name not in REPLACED)
    content = json.dumps([str(directory), [path.name for path in files], rest, template], sort_keys=True)
    made = cache / f"templated-{hashlib.sha256(content.encode()).hexdigest()[:16]}"
    if made.is_dir():
        return made
    try:
        with appearing_directory(made) as working:
            for path in files:
                os.symlink(path.absolute(), working / path.name)
            (working / SETTINGS).write_text(json.dumps(rest, indent=2), encoding="utf-8")
            (working / TEMPLATE).write_text(template, encoding="utf-8")
    except OSError as error:
        if not made.is_dir():  # else another run has made it meanwhile
            why = f"model.cache_dir: {cache} cannot be written: {reason(error)}"
            hint = "set model.cache_dir to a directory that you can write to"
            raise PreflightError(why, hint=hint) from error
    return made
