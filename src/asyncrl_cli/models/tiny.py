"""builtin:tiny before it has learned anything: a small Qwen3 and a tokenizer whose tokens are single characters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
SPECIAL_TOKENS = (PAD, EOS, UNKNOWN)
"""Their ids are 0, 1, 2; the characters follow."""

MAX_POSITIONS = 2048

TINY: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    # Untied: an engine that keeps a copy of its own of a tied head would go on with the old one after a weight load.
    "tie_word_embeddings": False,
}
"""Its sizes, under the names of a Qwen3's config.json."""


def tiny_tokenizer(characters: Iterable[str]) -> PreTrainedTokenizerFast:
    """One token per character, in the order given. Adds no special tokens; decoding gives the text back unchanged."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *characters))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )


def tiny_config(vocab_size: int) -> Qwen3Config:
    """0.75 M parameters at 64 tokens; `vocab_size` is rounded up to a multiple of 64."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=-(-vocab_size // 64) * 64,
        **TINY,
        max_position_embeddings=MAX_POSITIONS,
        # Texts are short: at the usual 10,000 most of a head's dimensions would hardly turn within them.
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        bos_token_id=None,
        eos_token_id=SPECIAL_TOKENS.index(EOS),
        pad_token_id=SPECIAL_TOKENS.index(PAD),
        dtype="float32",
    )


def tiny_model(vocab_size: int, *, seed: int) -> Qwen3ForCausalLM:
    """Random float32 weights from `seed`; the caller's random state stays as it was."""
    import torch
    from transformers import Qwen3ForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(tiny_config(vocab_size)).float()
