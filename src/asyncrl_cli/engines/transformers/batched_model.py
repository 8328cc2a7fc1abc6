"""The model of the engine `transformers`: opened, configured for continuous batching with an attention over
its paged cache, and asked for the logprobs of given tokens.

- `max_batch_tokens` leaves room for prefills beside one token of every slot. The scheduler serves decoding
  sequences first and prefills with the rest of the budget. If the budget were just the number of slots, a new
  prompt would get a few tokens per step, and half of the slots would stay empty as long as any sequence
  decodes.
- `num_blocks` holds all slots at full length (memory allowing), and `safety_margin` is 0: no sequence waits
  for cache, and none is evicted.
- Blocks are shared: a request reuses the full blocks that an earlier turn, or another response to its prompt,
  left in the cache. Blocks are looked up by their tokens alone, so a load must make all of them unfindable.
  PrefixScheduler adds what is left of the prompts of a group.
- Attention is the trainer's (models/attention.py), never a faster kernel. Continuous batching packs all
  running sequences into one row. With `sdpa` a mask hides the other sequences, so one step of B sequences of
  length L costs B * B * L. On a CPU, `packed_attention` takes its place, in which each sequence attends to
  its own keys only: B * L. Where a model's attention does more than sdpa, it is `own_paged_attention`.
- In a deterministic run (`run.deterministic`) what is computed for a token does not depend on the rest of
  the batch. Each linear layer computes FIXED_ROWS rows per product, because a kernel that is chosen by a
  product's shape rounds differently. A prompt is computed whole, in one pass, and shares nothing. Attention
  pads keys to a multiple of FIXED_KEYS, not to the longest sequence of the batch.
- TokenSampler chooses the tokens: continuous batching's own logprobs are of the truncated distribution, and
  its own sampling has one seed for all requests.

Attention writes new keys to the cache, and reads a sequence's keys only once. (The cache's own `update` would
first copy all keys into one packed row.)

Legend: B = sequences, T = tokens of the longest, V = vocabulary. In attention: Q = packed query tokens, K =
packed key tokens, H = query heads, J = key-value heads, G = H / J, D = head dimension, C = places in the
cache. In a block: B = sequences, P = queries of each, L = keys of the longest.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import ceil, inf
from typing import Any, NamedTuple

import psutil
import torch
from torch.nn import functional
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
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
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask

from asyncrl_cli.base.errors import PreflightError
from asyncrl_cli.engines.transformers import CACHE_SHARE_OF_MEMORY, PAGE_TOKENS, PREFILL_TOKENS_PACKED
from asyncrl_cli.engines.transformers.prefix_scheduler import PREFIX_SCHEDULER
from asyncrl_cli.engines.transformers.token_sampler import TokenSampler
from asyncrl_cli.models.attention import AttentionOutput, choose_attention, own_attention, takes_attention
from asyncrl_cli.profile.arithmetic import max_context_tokens
from asyncrl_cli.profile.schema import ProcessPlace, Profile

PREFILL_TOKENS_MASKED = 512
"""Used instead of PREFILL_TOKENS_PACKED where attention needs a mask: the mask has (batch tokens) x (all
cached tokens) entries."""
MAX_LOGITS_BYTES = 256 * 2**20
"""Largest logits of one scoring pass."""
PACKED_ATTENTION = "asyncrl_flash_cpu"
"""It contains "flash" because that is how continuous batching recognises attention that takes `cu_seq_lens_*`
and no mask."""
PAGED_EAGER = "paged|eager"
"""The name under which continuous batching looks up a model's `eager` attention."""
PLAIN_MODEL_TYPES = frozenset({"llama", "qwen2", "qwen3"})
"""Models with plain causal attention: no window, no soft-cap, no sinks. Other models run with transformers'
`sdpa`."""

MAX_PADDING = 1.3
"""Sequences are grouped into blocks of similar length, so that padding multiplies the keys read by at most
this factor."""
MIN_BLOCK = 8
"""Blocks with fewer sequences are not split: another call would cost more than the padding it saves."""
FIXED_ROWS = 32
FIXED_KEYS = 64
FIXED_ATTENTION = "asyncrl_flash_cpu_fixed"
"""`packed_attention` for deterministic runs."""


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
    rollout, section, is_fixed = profile.rollout, profile.model, profile.run.deterministic
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        place.model_dir,
        dtype=section.dtype,
        attn_implementation="eager",
        trust_remote_code=section.trust_remote_code,
    )
    model.to(torch.device(place.device)).requires_grad_(False).eval()
    if place.device == "cpu" and model.dtype == torch.float32:
        # A product of few rows with weights that lie transposed takes half to three quarters of the time:
        # MKL would rearrange the others each time. An embedding's rows are looked up, so it stays.
        for module in model.modules():
            if isinstance(module, torch.nn.Linear) and module is not model.get_output_embeddings():
                module.weight.data = module.weight.data.t().contiguous().t()
    attention = choose_attention(model)
    if not takes_attention(model):
        raise unbatchable(model, "it does not take its attention from transformers' AttentionInterface")
    prefill_tokens = PREFILL_TOKENS_MASKED
    on_gpu = model.device.type == "cuda"
    is_plain = set(getattr(model.config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
    is_plain = is_plain and model.config.model_type in PLAIN_MODEL_TYPES
    if attention == "sdpa" and is_plain and model.device.type == "cpu":
        prefill_tokens = PREFILL_TOKENS_PACKED
        # The public setter would look for a library behind any name that contains "flash".
        model.config._attn_implementation = FIXED_ATTENTION if is_fixed else PACKED_ATTENTION
    elif is_fixed:
        why = "only with plain causal attention on CPUs does a response not depend on the batch"
        raise PreflightError(
            f"run.deterministic = true with this {model.config.model_type} model on {place.device}: {why}",
            hint="--set run.deterministic=false, or a Llama, Qwen2 or Qwen3 model with placement.device=cpu",
        )
    if is_fixed:
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                vars(module)["forward"] = partial(fixed_linear, module)

    config = model.config.get_text_config()
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    bytes_per_block = 2 * config.num_hidden_layers * kv_heads * head_dim * model.dtype.itemsize * PAGE_TOKENS
    free_bytes = torch.cuda.mem_get_info(model.device)[0] if on_gpu else psutil.virtual_memory().available
    affordable = int(free_bytes * CACHE_SHARE_OF_MEMORY) // bytes_per_block
    # With fewer blocks than all slots need at full length, sequences may be evicted and prefilled again. That
    # costs time but loses nothing.
    blocks_of_one = ceil(max_context_tokens(profile) / PAGE_TOKENS)
    if is_fixed:  # one that is evicted would depend on the others, so none may be; a prompt is never split
        prefill_tokens = max(prefill_tokens, max_context_tokens(profile))
        if affordable < (needed := rollout.slots * blocks_of_one):
            raise PreflightError(
                f"run.deterministic = true: a cache for all slots at full length has {needed} blocks of "
                f"{PAGE_TOKENS} tokens, and memory is left for {affordable}",
                hint="lower rollout.slots or rollout.max_response_tokens",
            )
    batching = ContinuousBatchingConfig(
        page_size=PAGE_TOKENS,
        num_blocks=max(blocks_of_one, min(rollout.slots * blocks_of_one, affordable)),
        max_batch_tokens=rollout.slots + max(prefill_tokens, rollout.max_prompt_tokens),
        max_requests_per_batch=rollout.slots,
        max_blocks_per_request=0,
        allow_block_sharing=not is_fixed,
        scheduler_type=PREFIX_SCHEDULER,
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


def fixed_linear(module: torch.nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """The layer's output, FIXED_ROWS rows at a time: a row's does not depend on how many others there are."""
    rows = input.reshape(-1, input.shape[-1])
    padded = functional.pad(rows, (0, 0, 0, -len(rows) % FIXED_ROWS))
    outputs = [functional.linear(block, module.weight, module.bias) for block in padded.split(FIXED_ROWS)]
    return torch.cat(outputs)[: len(rows)].view(*input.shape[:-1], -1)


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


class _Sequence(NamedTuple):
    """How many queries and keys a sequence has in this pass, and where they begin among the packed ones."""

    num_queries: int
    num_keys: int
    first_query: int
    first_key: int


@dataclass(frozen=True, slots=True)
class _Block:
    """Sequences handled in one call, each with P queries (its last tokens): the rows of the queries, and the
    cache places of the keys, padded to the longest sequence. `mask_B1PL` hides padding and later keys. None:
    all have P keys."""

    queries_BP: torch.Tensor
    places_BL: torch.Tensor
    mask_B1PL: torch.Tensor | None


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    cache: PagedAttentionCache | None = None,
    is_fixed: bool = False,
    **kwargs: Any,
) -> AttentionOutput:
    """query (1, H, Q, D), key and value (1, J, Q, D) -> (1, Q, H, D). Without a cache this is transformers'
    causal sdpa. `is_fixed`: the result for a sequence does not depend on the others."""
    if cache is None:
        how = {name: kwargs[name] for name in ("dropout", "is_causal") if name in kwargs}
        output: AttentionOutput = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **how
        )
        return output
    allocator = cache.layer_to_allocator[module.layer_idx]
    tables = allocator.get_cache_for_block_table(module.layer_idx)
    keys_CJD, values_CJD = (pages.view(-1, *pages.shape[2:]) for pages in tables)
    written_Q = kwargs["write_index"][allocator.index]
    keys_CJD.index_copy_(0, written_Q, key[0].transpose(0, 1))
    values_CJD.index_copy_(0, written_Q, value[0].transpose(0, 1))
    places_K = kwargs["read_index"][allocator.index]
    if not len(places_K):  # all sequences are new: their keys are those that were just written
        places_K = written_Q
    query_QHD = query[0].transpose(0, 1)
    starts_q, starts_k = kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"][allocator.layer_type]
    if not hasattr(starts_q, "asyncrl_blocks"):  # all layers of a forward pass share this tensor
        blocks = _make_blocks(starts_q.tolist(), starts_k.tolist(), places_K, query.dtype, is_fixed)
        starts_q.asyncrl_blocks = blocks
    out_QHD = torch.empty(query_QHD.shape, dtype=query.dtype)
    for block in starts_q.asyncrl_blocks:
        attended = attend(query_QHD, keys_CJD, values_CJD, block, scaling)
        out_QHD.index_copy_(0, block.queries_BP.view(-1), attended)
    return out_QHD[None], None


def own_paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cache: PagedAttentionCache | None = None,
    **kwargs: Any,
) -> AttentionOutput:
    """The model's own attention function, with keys and values from the paged cache if there is one.

    Replaces transformers' `paged|eager`, one function for all models, which implements sinks but no soft-cap.
    """
    own = own_attention(module)
    assert own is not None, "the engine refuses models without one"
    if cache is not None:
        states = {"key_states": key, "value_states": value}
        key, value = cache.update(**states, layer_idx=module.layer_idx, kwargs=kwargs)
    return own(module, query, key, value, attention_mask, **kwargs)


def attend(
    query_QHD: torch.Tensor,
    keys_CJD: torch.Tensor,
    values_CJD: torch.Tensor,
    block: _Block,
    scaling: float | None,
) -> torch.Tensor:
    """(B * P, H, D)."""
    query_BPHD = query_QHD.index_select(0, block.queries_BP.view(-1)).unflatten(0, block.queries_BP.shape)
    flat, shape = block.places_BL.view(-1), block.places_BL.shape
    keys_BJLD, values_BJLD = (
        kv.index_select(0, flat).unflatten(0, shape).transpose(1, 2) for kv in (keys_CJD, values_CJD)
    )
    # With one query, the G query heads of a key-value head are passed as G queries, so that no key is
    # repeated.
    is_single = query_BPHD.shape[1] == 1
    out = functional.scaled_dot_product_attention(
        query_BPHD[:, 0].unflatten(1, (keys_CJD.shape[1], -1)) if is_single else query_BPHD.transpose(1, 2),
        keys_BJLD,
        values_BJLD,
        attn_mask=block.mask_B1PL,
        is_causal=block.mask_B1PL is None,
        scale=scaling,
        enable_gqa=not is_single,
    )
    return out.flatten(1, 2) if is_single else out.transpose(1, 2).flatten(0, 1)


def _make_blocks(
    starts_q: list[int],
    starts_k: list[int],
    places_K: torch.Tensor,
    dtype: torch.dtype,
    is_fixed: bool = False,
) -> tuple[_Block, ...]:
    """Group sequences with the same number of queries into blocks. A new block begins where padding would
    read too many keys; with `is_fixed`, where a sequence alone would be padded to another number of keys.
    `places_K`: where the packed keys are in the cache."""
    cut: list[list[_Sequence]] = []
    total = 0
    both = zip(pairwise(starts_q), pairwise(starts_k), strict=True)
    sequences = [_Sequence(next_q - q, next_k - k, q, k) for (q, next_q), (k, next_k) in both]
    for sequence in sorted(sequences, reverse=True):  # of a block, the longest comes first
        block = cut[-1] if cut else []
        most = MAX_PADDING * (total + sequence.num_keys)
        too_padded = len(block) >= MIN_BLOCK and block[0].num_keys * (len(block) + 1) > most
        if is_fixed and block:
            too_padded = _fixed_keys(block[0]) != _fixed_keys(sequence)
        if not block or block[0].num_queries != sequence.num_queries or too_padded:
            cut.append([])
            total = 0
        cut[-1].append(sequence)
        total += sequence.num_keys
    blocks = []
    for block in cut:
        num_queries, num_keys, _, _ = block[0]
        if is_fixed:
            num_keys = _fixed_keys(block[0])
        _, lengths_B, first_queries_B, first_keys_B = torch.tensor(block).unbind(1)
        steps_P, steps_L = torch.arange(num_queries), torch.arange(num_keys)
        packed_BL = (first_keys_B[:, None] + steps_L).masked_fill_(steps_L >= lengths_B[:, None], 0)
        mask_B1PL = None
        if num_keys > num_queries:
            last_seen_BP = lengths_B[:, None] - num_queries + steps_P
            hidden_B1PL = (steps_L > last_seen_BP[..., None])[:, None]
            mask_B1PL = torch.zeros(hidden_B1PL.shape, dtype=dtype).masked_fill_(hidden_B1PL, -inf)
        blocks.append(_Block(first_queries_B[:, None] + steps_P, places_K[packed_BL], mask_B1PL))
    return tuple(blocks)


def _fixed_keys(sequence: _Sequence) -> int:
    """A prompt, which is computed whole, needs no padding: its length is its own."""
    if sequence.num_queries == sequence.num_keys:
        return sequence.num_keys
    return ceil(sequence.num_keys / FIXED_KEYS) * FIXED_KEYS


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionInterface.register(FIXED_ATTENTION, partial(packed_attention, is_fixed=True))
AttentionInterface.register(PAGED_EAGER, own_paged_attention)
AttentionMaskInterface.register(PAGED_EAGER, eager_mask)
