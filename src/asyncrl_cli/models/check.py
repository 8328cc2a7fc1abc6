"""Whether trainer and engine could open a model, told before anything starts: its class, positions, vocabulary, shapes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl_cli.errors import ConfigError, PreflightError
from asyncrl_cli.profile.schema import Profile

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WAY_OUT = "asyncrl trains causal language models that this transformers knows, as written by save_pretrained"


def check_model(profile: Profile, directory: Path) -> int:
    """Returns its vocabulary's size. Raises PreflightError, or ConfigError for responses that are longer than its positions."""
    from asyncrl_cli.models.skeleton import skeleton

    try:
        model = skeleton(directory, trust_remote_code=profile.model.trust_remote_code)
    except Exception as error:  # whatever a configuration of another kind makes a library raise
        raise PreflightError(f"model.path: {directory} cannot be opened: {_first_sentence(error)}", hint=WAY_OUT) from error
    config = model.config.get_text_config()
    check_positions(profile, _positions(config))
    _check_shapes(directory, model)
    return int(config.vocab_size)


def check_vocabulary(directory: Path, num_tokens: int, vocab_size: int) -> None:
    """`num_tokens`: of the tokenizer."""
    if num_tokens > vocab_size:
        raise PreflightError(
            f"model.path: the tokenizer in {directory} has {num_tokens} tokens, the model {vocab_size}",
            hint="they are of different models, or tokens were added without resize_token_embeddings",
        )


def check_positions(profile: Profile, positions: int | None) -> None:
    """`positions`: of the model; None: as many as one likes. ConfigError if a prompt and its response may have more."""
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
    """Of what has the same name in file and model: a model of another size under this configuration."""
    from safetensors import safe_open

    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(str(path), framework="pt") as weights:
            for name in list(weights.keys()):
                found = tuple(weights.get_slice(name).get_shape())
                if wanted.get(name, found) != found:
                    raise PreflightError(
                        f"model.path: {path}: {name} has shape {found}; by config.json it is {wanted[name]}",
                        hint="weights and config.json are of different models: copy or download both again",
                    )


def _first_sentence(error: Exception) -> str:
    line = str(error).strip().partition("\n")[0] or type(error).__name__
    return line.partition(". ")[0].rstrip(".")
