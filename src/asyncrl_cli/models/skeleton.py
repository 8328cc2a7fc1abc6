"""The model that a configuration describes, without memory for its weights: the names and shapes that a trainer publishes."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel


def skeleton(model_dir: Path | str, *, trust_remote_code: bool) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(model_dir, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return model
