"""A tiny random Qwen3 with a character tokenizer, its weights after imagined steps, and plain forwards of
them."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

EOS = 1
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz ,.=#[]()+-*/:;?!<>|&%^~_"
VOCABULARY = {"<pad>": 0, "<eos>": EOS} | {character: i + 2 for i, character in enumerate(CHARACTERS)}


def make_model(seed: int = 0, *, scale: float = 4.0, tied: bool = False) -> Qwen3ForCausalLM:
    """`scale` sharpens the random logits, so that wrong weights, caches or positions show."""
    torch.manual_seed(seed)
    sizes = dict(vocab_size=64, hidden_size=128, intermediate_size=384, num_hidden_layers=3)
    sizes |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=1024)
    tokens = dict(bos_token_id=None, eos_token_id=EOS, pad_token_id=0)
    config = Qwen3Config(**sizes, **tokens, tie_word_embeddings=tied)
    model = Qwen3ForCausalLM(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.mul_(scale)
    return model


def save(model: Qwen3ForCausalLM, directory: Path) -> Path:
    model.save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    wrapped.save_pretrained(directory)
    return directory


def weights_after(model: Qwen3ForCausalLM, steps: int) -> dict[str, torch.Tensor]:
    """The model's weights, moved by `steps` fixed random steps."""
    generator = torch.Generator().manual_seed(7)
    moved: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            moved[name] = moved["model.embed_tokens.weight"]
            continue
        step = torch.randn(tensor.shape, generator=generator) * 0.05
        moved[name] = tensor + steps * step * (1.0 if tensor.ndim > 1 else 0.0)
    return moved


def plain_logprobs(
    model: Qwen3ForCausalLM, weights: dict[str, torch.Tensor], tokens: list[int], temperature: float = 1.0
) -> list[float]:
    """Of the tokens 1, 2, ...: one unbatched forward pass of transformers' sdpa model."""
    other = Qwen3ForCausalLM(model.config).eval()
    other.load_state_dict(weights)
    with torch.no_grad():
        logits = other(input_ids=torch.tensor([tokens])).logits[0, :-1] / temperature
    chosen = torch.tensor(tokens[1:])[:, None]
    return torch.log_softmax(logits, dim=-1).gather(1, chosen)[:, 0].tolist()


VOCABULARY_INVERSE = {token: character for character, token in VOCABULARY.items()}
