"""Whether trainer and engine could open a model, told before anything starts: its class, positions, vocabulary, shapes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl_cli.errors import ConfigError, PreflightError, first_line
from asyncrl_cli.models.shape import tensor_shapes
from asyncrl_cli.profile.schema import MOST, Profile

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WAY_OUT = "asyncrl trains causal language models that this transformers knows, as written by save_pretrained"
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
"""Of a configuration, as most families name them."""


def check_model(profile: Profile, directory: Path) -> int:
    """Returns its vocabulary's size. Raises PreflightError, or ConfigError for responses that are longer than its positions."""
    from asyncrl_cli.models.saved_form import skeleton

    _check_config(directory, trust_remote_code=profile.model.trust_remote_code)
    try:
        model = skeleton(directory, trust_remote_code=profile.model.trust_remote_code)
    except Exception as error:  # whatever a configuration of another kind makes a library raise
        raise PreflightError(f"model.path: {directory} cannot be opened: {first_line(error)}", hint=WAY_OUT) from error
    config = model.config.get_text_config()
    check_positions(profile, _positions(config))
    _check_shapes(directory, model)
    return int(config.vocab_size)


def _check_config(directory: Path, *, trust_remote_code: bool) -> None:
    """PreflightError unless config.json is that of a causal language model that transformers knows, with sizes that can be."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, __version__

    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
        known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in getattr(config, "auto_map", {})
        sizes = {name: getattr(config.get_text_config(), name, None) for name in SIZES}
    except Exception as error:  # of values that are no configuration's, transformers raises anything
        why = f"{directory}/config.json is no configuration that transformers {__version__} reads: {first_line(error)}"
        raise PreflightError(f"model.path: {why}", hint="copy or download it again") from error
    if not known:
        raise PreflightError(
            f'model.path: {directory} is a model of type "{config.model_type}", which is no causal language model',
            hint="asyncrl trains what AutoModelForCausalLM opens",
        )
    wrong = [f"{name} = {size}" for name, size in sizes.items() if isinstance(size, int) and not 1 <= size <= MOST]
    if wrong:
        raise PreflightError(f"model.path: {directory}/config.json: {wrong[0]:.100}", hint="copy or download it again")


def check_vocabulary(directory: Path, num_tokens: int, vocab_size: int) -> None:
    """PreflightError if the tokenizer has more tokens than the model."""
    if num_tokens > vocab_size:
        raise PreflightError(
            f"model.path: the tokenizer in {directory} has {num_tokens} tokens, the model {vocab_size}",
            hint="they are of different models, or tokens were added without resize_token_embeddings",
        )


def check_positions(profile: Profile, positions: int | None) -> None:
    """ConfigError if a prompt and its response may have more tokens than the model has `positions`; None is no limit."""
    rollout = profile.rollout
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    if positions is not None and longest > positions:
        raise ConfigError(
            f"rollout.max_prompt_tokens + rollout.max_response_tokens = {longest}, and the model has {positions} positions",
            hint=f"--set rollout.max_response_tokens={max(1, positions - rollout.max_prompt_tokens)}",
        )


def _positions(config: Any) -> int | None:
    """None where they are stretched (YaRN and the like), or not counted at all."""
    rope = getattr(config, "rope_parameters", None) or {}
    positions = getattr(config, "max_position_embeddings", None)
    is_plain = rope.get("rope_type", "default") == "default" and not any(isinstance(entry, dict) for entry in rope.values())
    return int(positions) if positions and is_plain else None


def _check_shapes(directory: Path, model: PreTrainedModel) -> None:
    """PreflightError if a tensor has another shape in its file than in the model: the files are of a model of another size."""
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for path in sorted(directory.glob("*.safetensors")):
        for name, found in tensor_shapes(path).items():
            if wanted.get(name, found) != found:
                raise PreflightError(
                    f"model.path: {path}: {name} has shape {found}; by config.json it is {wanted[name]}",
                    hint="weights and config.json are of different models: copy or download both again",
                )
