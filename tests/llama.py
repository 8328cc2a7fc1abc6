"""The configuration of a model of seven billion parameters, for plans: nothing is loaded."""

from __future__ import annotations

LLAMA_7B = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
