"""The model of the engine `transformers`: opened, configured for continuous batching, and asked for the
logprobs of given tokens.

- `max_batch_tokens` leaves room for prefills beside one token of every slot. The scheduler serves decoding
  sequences first and prefills with the rest of the budget. If the budget were just the number of slots, a new
  prompt would get a few tokens per step, and half of the slots would stay empty as long as any sequence
  decodes.
- `num_blocks` holds all slots at full length (memory allowing), and `safety_margin` is 0: no sequence waits
  for cache, and none is evicted.
- Blocks are shared: a request reuses the full blocks that an earlier turn, or another response to its prompt,
  left in the cache. Blocks are looked up by their tokens alone, so a load must make all of them unfindable.
- Attention is the trainer's (models/attention.py), never a faster kernel. If that is sdpa on a CPU, packed
  sequences are attended one by one (paged_attention.py) instead of all at once under a mask.
- TokenSampler chooses the tokens: continuous batching's own logprobs are of the truncated distribution, and
  its own sampling has one seed for all requests.

Legend: B = sequences, T = tokens of the longest, V = vocabulary.
"""

from __future__ import annotations

from math import ceil

import psutil
import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.generation.continuous_batching.cb_logits_processors import (
    ContinuousBatchingLogitsProcessorList,
)

from asyncrl_cli.base.errors import PreflightError
from asyncrl_cli.engines.transformers import (
    CACHE_SHARE_OF_MEMORY,
    PAGE_TOKENS,
    PREFILL_TOKENS_PACKED,
    paged_attention,
)
from asyncrl_cli.engines.transformers.token_sampler import TokenSampler
from asyncrl_cli.models.attention import choose_attention, takes_attention
from asyncrl_cli.profile.arithmetic import max_context_tokens
from asyncrl_cli.profile.schema import ProcessPlace, Profile

PREFILL_TOKENS_MASKED = 512
"""Used instead of PREFILL_TOKENS_PACKED where attention needs a mask: the mask has (batch tokens) x (all
cached tokens) entries."""
MAX_LOGITS_BYTES = 256 * 2**20
"""Largest logits of one scoring pass."""


def unbatchable(model: PreTrainedModel, why: str) -> PreflightError:
    return PreflightError(
        f'rollout.engine = "transformers" cannot batch a {model.config.model_type} model: {why}',
        hint="--set rollout.engine=vllm",
    )


def open_model(
    profile: Profile, place: ProcessPlace, sampler: TokenSampler
) -> tuple[PreTrainedModel, ContinuousBatchingManager]:
    """The model, with the same attention as the trainer, and its manager, which is not started yet. Raises
    PreflightError if its attention cannot be replaced."""
    rollout, section = profile.rollout, profile.model
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        place.model_dir,
        dtype=section.dtype,
        attn_implementation="eager",
        trust_remote_code=section.trust_remote_code,
    )
    model.to(torch.device(place.device)).requires_grad_(False).eval()
    attention = choose_attention(model)
    if not takes_attention(model):
        raise unbatchable(model, "it does not take its attention from transformers' AttentionInterface")
    prefill_tokens = PREFILL_TOKENS_MASKED
    on_gpu = model.device.type == "cuda"
    is_plain = set(getattr(model.config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
    is_plain = is_plain and model.config.model_type in paged_attention.MODEL_TYPES
    if attention == "sdpa" and is_plain and model.device.type == "cpu":
        prefill_tokens = PREFILL_TOKENS_PACKED
        # The public setter would look for a library behind any name that contains "flash".
        model.config._attn_implementation = paged_attention.NAME

    config = model.config.get_text_config()
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    bytes_per_block = 2 * config.num_hidden_layers * kv_heads * head_dim * model.dtype.itemsize * PAGE_TOKENS
    free_bytes = torch.cuda.mem_get_info(model.device)[0] if on_gpu else psutil.virtual_memory().available
    affordable = int(free_bytes * CACHE_SHARE_OF_MEMORY) // bytes_per_block
    # With fewer blocks than all slots need at full length, sequences may be evicted and prefilled again. That
    # costs time but loses nothing.
    blocks_of_one = ceil(max_context_tokens(profile) / PAGE_TOKENS)
    batching = ContinuousBatchingConfig(
        page_size=PAGE_TOKENS,
        num_blocks=max(blocks_of_one, min(rollout.slots * blocks_of_one, affordable)),
        max_batch_tokens=rollout.slots + max(prefill_tokens, rollout.max_prompt_tokens),
        max_requests_per_batch=rollout.slots,
        max_blocks_per_request=0,
        allow_block_sharing=True,
        use_async_batching=False,
        use_cuda_graph=False if on_gpu else None,
        auto_switch_to_flash=False,
        safety_margin=0.0,
        return_logprobs=False,
        seed=profile.run.seed,
    )
    greedy = GenerationConfig(do_sample=False, max_new_tokens=rollout.max_response_tokens, eos_token_id=-1)
    manager = model.init_continuous_batching(greedy, batching)
    manager.logit_processor = ContinuousBatchingLogitsProcessorList(LogitsProcessorList([sampler]))
    manager.logit_processor.tensors_required = 1
    return model, manager


def eos_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """End-of-sequence tokens: of the generation config, else of the model config, else of the tokenizer."""
    for source in (model.generation_config, model.config, tokenizer):
        eos = getattr(source, "eos_token_id", None)
        if eos is not None:
            return frozenset(eos if isinstance(eos, list) else [eos])
    return frozenset()


def score(model: PreTrainedModel, sequences: list[list[int]], temperature: float) -> list[list[float]]:
    """For each sequence, the logprobs of its tokens 1, 2, ... at `temperature` (0 counts as 1)."""
    longest = max((len(sequence) for sequence in sequences), default=0)
    bytes_per_sequence = 4 * 2 * longest * model.config.get_text_config().vocab_size
    step = max(1, MAX_LOGITS_BYTES // max(1, bytes_per_sequence))
    scores: list[list[float]] = []
    for begin in range(0, len(sequences), step):
        batch = sequences[begin : begin + step]
        longest = max(len(sequence) for sequence in batch)
        # on the right: under a causal mask no real token sees the padding
        padded = [sequence + [0] * (longest - len(sequence)) for sequence in batch]
        tokens_BT = torch.tensor(padded, device=model.device)
        with torch.no_grad():
            logits_BTV = model(input_ids=tokens_BT, use_cache=False).logits[:, :-1].float()
        logprobs_BTV = torch.log_softmax(logits_BTV / (temperature or 1.0), dim=-1)
        logprobs_BT = logprobs_BTV.gather(2, tokens_BT[:, 1:, None])[..., 0].tolist()
        scores += [row[: len(sequence) - 1] for row, sequence in zip(logprobs_BT, batch, strict=True)]
    return scores
