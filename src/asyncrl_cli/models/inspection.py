"""Checks, before anything starts, that trainer and engine can open a model: files, class, positions,
vocabulary, shapes."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NotRequired, TypeVar

from annotated_types import Interval
from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from asyncrl_cli.base.errors import ConfigError, PreflightError, first_line
from asyncrl_cli.base.safe_files import load_json
from asyncrl_cli.models.shape import tensor_shapes
from asyncrl_cli.profile.arithmetic import max_context_tokens
from asyncrl_cli.profile.fields import MOST
from asyncrl_cli.profile.schema import Profile

if TYPE_CHECKING:
    from transformers import PretrainedConfig

T = TypeVar("T")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
WEIGHTS = "model.safetensors"
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
    if not _read_json(directory / "config.json", _Config).get("model_type"):
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
        raise ConfigError(
            f"trainer.sequence_parallel_size = {sequence_size} does not divide the model's {heads} attention "
            "heads",
            hint=f"--set trainer.sequence_parallel_size={math.gcd(sequence_size, heads)}",
        )


def positions_of(config: PretrainedConfig) -> int | None:
    """The model's number of positions; None if there is no limit, or if rope scaling (YaRN and the like)
    extends it."""
    rope = getattr(config, "rope_parameters", None) or {}
    positions = getattr(config, "max_position_embeddings", None)
    has_parts = any(isinstance(entry, dict) for entry in rope.values())
    is_plain = rope.get("rope_type", "default") == "default" and not has_parts
    return int(positions) if positions and is_plain else None
