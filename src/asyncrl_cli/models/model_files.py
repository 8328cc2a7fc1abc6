"""A model's Hugging Face directory: checked before anything starts (can trainer and engine open it: files,
class, positions, vocabulary, shapes), copied without its weights, and its weight files found and written.
Imports torch only to check a model."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NotRequired, TypeVar

from annotated_types import Interval
from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from asyncrl_cli.base.errors import ConfigError, PreflightError, first_line
from asyncrl_cli.base.safe_files import load_json
from asyncrl_cli.base.storage import naming
from asyncrl_cli.models.shape import tensor_shapes
from asyncrl_cli.profile.arithmetic import max_context_tokens
from asyncrl_cli.profile.fields import MOST
from asyncrl_cli.profile.schema import Profile

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

T = TypeVar("T")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
CONFIG, WEIGHTS = "config.json", "model.safetensors"
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
DTYPE_KEYS = ("dtype", "torch_dtype")
RUN_COPY = "model"
"""Folder in a run's directory with a copy of its model directory without the weights, so that an export needs
nothing else."""
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
"""Keys of a configuration that hold sizes, as most model families name them."""


class _Sizes(TypedDict):
    """The number of layers is bounded, because transformers makes a list with one entry per layer."""

    num_hidden_layers: NotRequired[Annotated[int, Interval(ge=1, le=100_000)] | None]


class _Config(_Sizes):
    """The keys of config.json that are checked here."""

    model_type: NotRequired[str | None]
    text_config: NotRequired[_Sizes | None]


class WeightIndex(TypedDict):
    """The content of model.safetensors.index.json."""

    weight_map: dict[str, str]


def refused(why: str, hint: str = "copy or download it again") -> PreflightError:
    return PreflightError(f"model.path: {why}", hint=hint)


def check_model_directory(directory: Path) -> None:
    """Raises PreflightError if configuration, weights (every shard) or tokenizer are missing or damaged."""
    check_config(directory)
    for name in (*TOKENIZER_FILES, *TOKENIZER_SETTINGS):
        if os.path.lexists(directory / name) and not os.path.isfile(directory / name):
            raise refused(f"{directory / name} is not a regular file")
    index = directory / f"{WEIGHTS}.index.json"
    indexed = _read_json(index, WeightIndex)["weight_map"] if os.path.lexists(index) else {"": WEIGHTS}
    wanted = sorted(set(indexed.values()))
    missing = [name for name in wanted if Path(name).name != name or not os.path.isfile(directory / name)]
    if not wanted or missing:
        what = f"{missing[0]} is missing" if missing else f"{index.name} names no file"
        hint = "asyncrl reads safetensors: model.save_pretrained(directory) writes them"
        raise refused(f"{directory} holds no weights: {what}", hint)
    for name in wanted:
        if not tensor_shapes(directory / name):
            raise refused(f"{directory / name} holds no tensors")
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        hint = f"save one beside the weights: tokenizer.save_pretrained({str(directory)!r})"
        raise refused(f"{directory} holds no tokenizer ({', '.join(TOKENIZER_FILES)})", hint)


def check_config(directory: Path) -> None:
    """Raises PreflightError if config.json cannot describe a model, or describes one with too many layers to
    open."""
    if not _read_json(directory / CONFIG, _Config).get("model_type"):
        raise refused(f"{directory}/config.json names no model_type", "save the model with save_pretrained")


def _read_json(path: Path, kind: type[T]) -> T:
    if not os.path.lexists(path):
        raise refused(f"{path.parent} holds no {path.name}", "name a directory written by save_pretrained")
    try:
        return load_json(path, kind, error=PreflightError)
    except PreflightError as error:
        raise refused(error.message) from None


def check_model(profile: Profile, directory: Path) -> int:
    """Check class, positions and shapes; returns the vocabulary size.

    Raises PreflightError if config.json does not describe a causal language model that transformers supports,
    of plausible sizes, or one of another size than the weights. ConfigError if prompt and response may exceed
    its positions, or if its attention heads do not divide by `trainer.sequence_parallel_size`.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, __version__

    from asyncrl_cli.models.saved_form import skeleton

    trusts = profile.model.trust_remote_code
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trusts)
        is_mapped = "AutoModelForCausalLM" in getattr(config, "auto_map", {})
        is_known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or is_mapped
        sizes = {name: getattr(config.get_text_config(), name, None) for name in SIZES}
    except Exception as error:  # transformers raises anything for malformed values
        how = f"as a configuration by transformers {__version__}: {first_line(error)}"
        raise refused(f"{directory}/config.json cannot be read {how}") from error
    if not is_known:
        why = f'{directory} is a model of type "{config.model_type}", which is not a causal language model'
        raise refused(why, "asyncrl trains models that AutoModelForCausalLM opens")
    for name, size in sizes.items():
        if isinstance(size, int) and not 1 <= size <= MOST:
            raise refused(f"{directory}/config.json: {f'{name} = {size}':.100}")
    try:
        model = skeleton(directory, trust_remote_code=trusts)
    except Exception as error:  # here, too
        models = "causal language models that this version of transformers supports"
        hint = f"asyncrl trains {models}, saved with save_pretrained"
        raise refused(f"{directory} cannot be opened: {first_line(error)}", hint) from error
    text_config = model.config.get_text_config()
    check_positions(profile, positions_of(text_config))
    check_heads(text_config, profile.trainer.sequence_parallel_size)
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for path in sorted(directory.glob("*.safetensors")):
        for name, found in tensor_shapes(path).items():
            if wanted.get(name, found) != found:
                hint = "weights and config.json belong to different models: copy or download both again"
                raise refused(f"{path}: {name} has shape {found}, but {wanted[name]} by config.json", hint)
    return int(text_config.vocab_size)


def check_vocabulary(directory: Path, num_tokens: int, vocab_size: int) -> None:
    """Raises PreflightError if the tokenizer has more tokens than the model."""
    if num_tokens > vocab_size:
        hint = "they belong to different models, or tokens were added without resize_token_embeddings"
        raise refused(f"the tokenizer in {directory} has {num_tokens} tokens, the model {vocab_size}", hint)


def check_positions(profile: Profile, positions: int | None) -> None:
    """Raises ConfigError if a sequence may have more tokens than the model has `positions`; None means no
    limit."""
    longest = max_context_tokens(profile)
    if positions is None or longest <= positions:
        return
    if profile.env.max_context_tokens is not None:
        key, less = "env.max_context_tokens", f"env.max_context_tokens={positions}"
    else:
        key = "rollout.max_prompt_tokens + rollout.max_response_tokens"
        less = f"rollout.max_response_tokens={max(1, positions - profile.rollout.max_prompt_tokens)}"
    raise ConfigError(f"{key} = {longest}, but the model has {positions} positions", hint=f"--set {less}")


def check_heads(config: PretrainedConfig, sequence_size: int) -> None:
    """Raises ConfigError unless the attention heads divide by the ranks of a sequence
    (`trainer.sequence_parallel_size`)."""
    heads = getattr(config, "num_attention_heads", 1)
    if heads % sequence_size:
        key, divisor = "trainer.sequence_parallel_size", math.gcd(sequence_size, heads)
        why = f"{key} = {sequence_size} does not divide the model's {heads} attention heads"
        raise ConfigError(why, hint=f"--set {key}={divisor}")


def positions_of(config: PretrainedConfig) -> int | None:
    """The model's number of positions; None if there is no limit, or if rope scaling (YaRN and the like)
    extends it."""
    rope = getattr(config, "rope_parameters", None) or {}
    positions = getattr(config, "max_position_embeddings", None)
    has_parts = any(isinstance(entry, dict) for entry in rope.values())
    is_plain = rope.get("rope_type", "default") == "default" and not has_parts
    return int(positions) if positions and is_plain else None


def copy_model_files(model_dir: Path, target: Path, dtype: str | None = None) -> None:
    """Copy everything but weights to an existing directory. `dtype` is that of the weights to be written
    there. It is set in the copied configuration, because transformers and vLLM open weights with the dtype
    that it names."""
    for path in sorted(model_dir.iterdir()):
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith(WEIGHT_SUFFIXES):
            shutil.copyfile(path, target / path.name)
    config = target / CONFIG
    if dtype is not None and config.exists():
        content = _with_dtype(json.loads(config.read_text(encoding="utf-8")), dtype)
        config.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def keep_model_files(model_dir: Path, run_dir: Path) -> None:
    """Make the run's copy of the model files, unless it exists."""
    if not (run_dir / RUN_COPY).exists():
        working = run_dir / f".{RUN_COPY}.tmp"
        shutil.rmtree(working, ignore_errors=True)
        working.mkdir()
        copy_model_files(model_dir, working)
        working.rename(run_dir / RUN_COPY)


def tensor_files(directory: Path) -> dict[str, Path]:
    """Which weight file holds each tensor. The directory must have been checked before."""
    index = directory / f"{WEIGHTS}.index.json"
    if index.exists():
        return {name: directory / file for name, file in load_json(index, WeightIndex)["weight_map"].items()}
    return dict.fromkeys(tensor_shapes(directory / WEIGHTS), directory / WEIGHTS)


def write_weights(tensors: Mapping[str, torch.Tensor], path: Path, **header: str) -> None:
    """Write a safetensors file with the permissions of any new file. (By default, safetensors lets only the
    owner read it.)"""
    from safetensors.torch import save_file

    with naming(path):
        path.touch()
        mode = path.stat().st_mode & 0o777
        save_file(dict(tensors), path, metadata={"format": "pt", **header})
        path.chmod(mode)


def weights_file(index: int, total: int) -> str:
    """Name of one of `total` weight files, as `save_pretrained` has it."""
    return WEIGHTS if total == 1 else f"model-{index + 1:05d}-of-{total:05d}.safetensors"


def write_index(directory: Path, file_of: Mapping[str, str], num_bytes: int) -> None:
    """Write the index, which names the file of each tensor. A single file needs no index."""
    if len(set(file_of.values())) > 1:
        content = {"metadata": {"total_size": num_bytes}, "weight_map": dict(file_of)}
        index = directory / f"{WEIGHTS}.index.json"
        index.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _with_dtype(config: dict[str, Any], dtype: str) -> dict[str, Any]:
    """The configuration with `dtype`, under the key that transformers writes, at the top and in each part
    that names a dtype."""
    parts = {key: value for key, value in config.items() if key not in DTYPE_KEYS}
    for key, value in parts.items():
        if isinstance(value, dict) and value.keys() & set(DTYPE_KEYS):
            parts[key] = _with_dtype(value, dtype)
    return {**parts, "dtype": dtype}
