"""How transformers' continuous batching is configured, and why.

- `max_batch_tokens` leaves room for prefills beside one token of every slot. The scheduler serves decoding sequences
  first and prefills with what is left: with a budget of just the slots, a new prompt gets a few tokens per step, and
  half of the slots stay empty for as long as anybody decodes.
- `num_blocks` holds all slots at full length (memory allowing), and `safety_margin` is 0: nobody waits for cache, and
  nobody is evicted.
- No block sharing: a shared prompt block would hold keys of older weights after a load.
- The attention that the trainer has, too (models/attention.py): never switched to another kernel, however fast. Where that is
  sdpa, on a CPU in a form that keeps the packed sequences apart (paged_attention.py) instead of a mask over all of them.
- TokenSampler chooses the tokens: continuous batching's own logprobs are of the truncated distribution, and its own
  sampling has one seed for all.
"""

from __future__ import annotations

from math import ceil

import psutil
import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList

from asyncrl_cli.engines.transformers import paged_attention
from asyncrl_cli.engines.transformers.token_sampler import TokenSampler
from asyncrl_cli.models.attention import Attention
from asyncrl_cli.profile.schema import RolloutSection

PAGE_TOKENS = 32
PREFILL_TOKENS_PACKED = 4096
"""Prefill budget per step where attention needs no mask: rebuilding 64 caches takes a few steps."""
PREFILL_TOKENS_MASKED = 512
"""... and where it does: the mask has (batch tokens) x (all cached tokens) entries."""
CACHE_SHARE_OF_MEMORY = 0.5


def make_manager(
    model: PreTrainedModel,
    sampler: TokenSampler,
    attention: Attention,
    rollout: RolloutSection,
    *,
    seed: int,
) -> ContinuousBatchingManager:
    """A manager that is not started yet. `attention`: what was chosen for the model."""
    packed = attention == "sdpa" and paged_attention.applies_to(model.config, model.device)
    if packed:
        model.config._attn_implementation = paged_attention.NAME
    prefill_tokens = PREFILL_TOKENS_PACKED if packed else PREFILL_TOKENS_MASKED
    config = ContinuousBatchingConfig(
        page_size=PAGE_TOKENS,
        num_blocks=_num_blocks(model, rollout.slots, rollout.max_prompt_tokens + rollout.max_response_tokens),
        max_batch_tokens=rollout.slots + max(prefill_tokens, rollout.max_prompt_tokens),
        max_requests_per_batch=rollout.slots,
        max_blocks_per_request=0,
        allow_block_sharing=False,
        use_async_batching=False,
        use_cuda_graph=False if model.device.type == "cuda" else None,
        auto_switch_to_flash=False,
        safety_margin=0.0,
        return_logprobs=False,
        seed=seed,
    )
    greedy = GenerationConfig(do_sample=False, max_new_tokens=rollout.max_response_tokens, eos_token_id=-1)
    manager = model.init_continuous_batching(greedy, config)
    manager.logit_processor = _processors(sampler)
    return manager


def eos_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """End-of-sequence tokens: of the generation config, else of the model's, else of the tokenizer."""
    for source in (model.generation_config, model.config, tokenizer):
        eos = getattr(source, "eos_token_id", None)
        if eos is not None:
            return frozenset(eos if isinstance(eos, list) else [eos])
    return frozenset()


def _processors(sampler: TokenSampler) -> ContinuousBatchingLogitsProcessorList:
    processors = ContinuousBatchingLogitsProcessorList(LogitsProcessorList([sampler]))
    processors.tensors_required = 1
    return processors


def _num_blocks(model: PreTrainedModel, slots: int, max_tokens: int) -> int:
    """All slots at full length; less where that is more than half of the free memory (then sequences may be evicted and
    prefilled again, which costs time but loses nothing)."""
    config = model.config.get_text_config()
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    bytes_per_block = 2 * config.num_hidden_layers * kv_heads * head_dim * model.dtype.itemsize * PAGE_TOKENS
    blocks_of_one = ceil(max_tokens / PAGE_TOKENS)
    affordable = int(_free_bytes(model.device) * CACHE_SHARE_OF_MEMORY) // bytes_per_block
    return max(blocks_of_one, min(slots * blocks_of_one, affordable))


def _free_bytes(device: torch.device) -> int:
    """psutil is also what continuous batching itself needs to know the memory of a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
