"""The engine's model: opened, configured for transformers' continuous batching, and asked for the logprobs of
given tokens.

- `max_batch_tokens` leaves room for prefills beside one token of every slot. The scheduler serves decoding
  sequences first and prefills with the rest of the budget. If the budget were just the number of slots, a new
  prompt would get a few tokens per step, and half of the slots would stay empty as long as any sequence
  decodes.
- `num_blocks` holds all slots at full length (memory allowing), and `safety_margin` is 0: no sequence waits
  for cache, and none is evicted.
- Blocks are shared: a request reuses the full blocks that an earlier turn, or another response to its prompt,
  left in the cache. Blocks are looked up by their tokens alone, so a load must make all of them unfindable
  (`forget_prefixes`).
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
from transformers.generation.continuous_batching import ContinuousBatchingManager, PagedAttentionCache
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


def open_model(profile: Profile, place: ProcessPlace) -> PreTrainedModel:
    """Load the model with the same attention as the trainer. Raises PreflightError if its attention cannot be
    replaced."""
    how = profile.model
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        place.model_dir, dtype=how.dtype, attn_implementation="eager", trust_remote_code=how.trust_remote_code
    )
    model.to(torch.device(place.device)).requires_grad_(False).eval()
    attention = choose_attention(model)
    if not takes_attention(model):
        raise unbatchable(model, "it does not take its attention from transformers' AttentionInterface")
    if attention == "sdpa" and paged_attention.applies_to(model.config, model.device):
        model.config._attn_implementation = paged_attention.NAME
    return model


def unbatchable(model: PreTrainedModel, why: str) -> PreflightError:
    return PreflightError(
        f'rollout.engine = "transformers" cannot batch a {model.config.model_type} model: {why}',
        hint="--set rollout.engine=vllm",
    )


def make_manager(
    model: PreTrainedModel, sampler: TokenSampler, profile: Profile
) -> ContinuousBatchingManager:
    """A manager that is not started yet."""
    rollout, packed = profile.rollout, model.config._attn_implementation == paged_attention.NAME
    prefill_tokens = PREFILL_TOKENS_PACKED if packed else PREFILL_TOKENS_MASKED
    config = ContinuousBatchingConfig(
        page_size=PAGE_TOKENS,
        num_blocks=_num_blocks(model, rollout.slots, max_context_tokens(profile)),
        max_batch_tokens=rollout.slots + max(prefill_tokens, rollout.max_prompt_tokens),
        max_requests_per_batch=rollout.slots,
        max_blocks_per_request=0,
        allow_block_sharing=True,
        use_async_batching=False,
        use_cuda_graph=False if model.device.type == "cuda" else None,
        auto_switch_to_flash=False,
        safety_margin=0.0,
        return_logprobs=False,
        seed=profile.run.seed,
    )
    greedy = GenerationConfig(do_sample=False, max_new_tokens=rollout.max_response_tokens, eos_token_id=-1)
    manager = model.init_continuous_batching(greedy, config)
    manager.logit_processor = ContinuousBatchingLogitsProcessorList(LogitsProcessorList([sampler]))
    manager.logit_processor.tensors_required = 1
    return manager


def forget_prefixes(cache: PagedAttentionCache, *, goes_on: bool) -> None:
    """Stop later requests from finding the blocks filled so far. Call this inside a pause.

    `goes_on`: running requests keep their blocks. The block that each is filling will hold keys of two
    versions, and continuous batching would share it like any other. It cannot exclude single requests, so
    from then on nothing is shared.
    """
    cache.evict_cached_blocks()
    if goes_on and any(allocator.block_table for allocator in cache.cache_allocators.values()):
        cache.allow_block_sharing = cache.use_prefix_sharing = False
    for allocator in cache.cache_allocators.values():
        allocator.ledger.hash_to_block.clear()
        allocator.ledger.block_to_hash.clear()


def eos_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """End-of-sequence tokens: of the generation config, else of the model config, else of the tokenizer."""
    for source in (model.generation_config, model.config, tokenizer):
        eos = getattr(source, "eos_token_id", None)
        if eos is not None:
            return frozenset(eos if isinstance(eos, list) else [eos])
    return frozenset()


@torch.no_grad()
def score(model: PreTrainedModel, sequences: list[list[int]], temperature: float) -> list[list[float]]:
    """For each sequence, the logprobs of its tokens 1, 2, ... at `temperature` (0 counts as 1)."""
    longest = max((len(sequence) for sequence in sequences), default=0)
    bytes_per_sequence = 4 * 2 * longest * model.config.get_text_config().vocab_size
    step = max(1, MAX_LOGITS_BYTES // max(1, bytes_per_sequence))
    scores: list[list[float]] = []
    for begin in range(0, len(sequences), step):
        scores.extend(_score_batch(model, sequences[begin : begin + step], temperature or 1.0))
    return scores


def _score_batch(model: PreTrainedModel, sequences: list[list[int]], temperature: float) -> list[list[float]]:
    """Padded on the right: under a causal mask no real token sees the padding."""
    longest = max(len(sequence) for sequence in sequences)
    padded = [sequence + [0] * (longest - len(sequence)) for sequence in sequences]
    tokens_BT = torch.tensor(padded, device=model.device)
    logits_BTV = model(input_ids=tokens_BT, use_cache=False).logits[:, :-1].float() / temperature
    logprobs_BT = torch.log_softmax(logits_BTV, dim=-1).gather(2, tokens_BT[:, 1:, None])[..., 0]
    return [row[: len(sequence) - 1] for row, sequence in zip(logprobs_BT.tolist(), sequences, strict=True)]


def _num_blocks(model: PreTrainedModel, slots: int, max_tokens: int) -> int:
    """Number of cache blocks: for all slots at full length, within CACHE_SHARE_OF_MEMORY of the free memory.
    With fewer, sequences may be evicted and prefilled again, which costs time but loses nothing."""
    config = model.config.get_text_config()
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    bytes_per_block = 2 * config.num_hidden_layers * kv_heads * head_dim * model.dtype.itemsize * PAGE_TOKENS
    blocks_of_one = ceil(max_tokens / PAGE_TOKENS)
    affordable = int(_free_bytes(model.device) * CACHE_SHARE_OF_MEMORY) // bytes_per_block
    return max(blocks_of_one, min(slots * blocks_of_one, affordable))


def _free_bytes(device: torch.device) -> int:
    """Free memory of the device; for a CPU, of the machine."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
