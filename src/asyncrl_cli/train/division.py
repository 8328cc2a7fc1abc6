"""Chooses how a model's decoder takes microbatches: rows padded or end to end (packed_rows.py), and whether
what rows share is computed once (shared_prefixes.py). Each way is tried on a sample before it is used.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from transformers import PreTrainedModel

from asyncrl_cli.base.errors import ConfigError, first_line
from asyncrl_cli.models.attention import TRAINED_SDPA, Attention
from asyncrl_cli.models.model_files import check_heads
from asyncrl_cli.train.batch import Microbatch, scoring_microbatch
from asyncrl_cli.train.packed_rows import (
    UNPADDED,
    Divide,
    Kernel,
    Unpadded,
    by_lengths,
    in_padded_rows,
    padded,
)
from asyncrl_cli.train.ranks import Ranks
from asyncrl_cli.train.shared_prefixes import SharedPrefixes, in_blocks, in_branches

SAMPLE = ((0, 5), (0, 24), (9, 5), (12, 11), (12, 3), (0, 1), (1, 14))
"""Rows of the sample: how many first tokens each has from the row before, and how many of its own."""
MAX_TOKEN_DIFF = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Largest relative difference of a token's hidden state due to rounding in a deep model. Seeing another row
makes it larger."""
MAX_KERNEL_DIFF = 0.05
"""Largest relative difference of attention's values and gradients: ten times the error of rounding a value to
bfloat16."""

logger = logging.getLogger(__name__)


def is_packed(divide: Divide) -> bool:
    """Whether nothing is computed for padding of rows, not even in attention. A microbatch's budget then
    counts tokens alone."""
    rows = divide.rows if isinstance(divide, SharedPrefixes) else divide
    return isinstance(rows, Unpadded) and rows.kernel is by_lengths


def choose_division(
    decoder: PreTrainedModel, attention: Attention, ranks: Ranks, shares: bool | None = None
) -> Divide:
    """`Unpadded` if the model allows it, and either tokens must be divided or a kernel makes it worthwhile;
    else `padded`. Around it `SharedPrefixes`, if the model allows it (`shares`: `trainer.shared_prefixes`).
    Sets the decoder's attention, for which `attention` was chosen before. A collective.

    Raises ConfigError if this model does not support `trainer.sequence_parallel_size`, or sharing.
    """
    config, size = decoder.config.get_text_config(), ranks.sequence_size
    check_heads(config, size)
    if kinds := getattr(config, "layer_types", None):
        attends_everywhere = set(kinds) == {"full_attention"}
    else:  # all layers are of one kind
        windows = (getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size"))
        attends_everywhere = not any(windows)
    rows, is_gpu = padded, ranks.device.type == "cuda"
    if attention == "sdpa" and attends_everywhere:
        packs = is_gpu and decoder.dtype != torch.float32 and runs(by_lengths, decoder, ranks)
        if packs or size > 1:
            unpadded = Unpadded(by_lengths if packs else in_padded_rows, ranks)
            rows = unpadded if is_same(decoder, unpadded, ranks) else padded
        if shares is not False and (size == 1 or rows is not padded):
            kernel = in_blocks if is_gpu and runs(in_blocks, decoder, ranks) else in_branches
            trees = SharedPrefixes(rows, kernel, ranks)
            # On a GPU, the masks of `in_branches` are in the way of its fast kernels.
            if (shares or kernel is in_blocks or not is_gpu) and is_same(decoder, trees, ranks):
                return trees
    if attention == "sdpa" and rows is padded and decoder.dtype == torch.bfloat16 and not is_gpu:
        is_same(decoder, padded, ranks, TRAINED_SDPA)
    if size > 1 and rows is padded:
        asked, without = f"trainer.sequence_parallel_size = {size}", "trainer.sequence_parallel_size=1"
    elif shares:
        asked, without = "trainer.shared_prefixes = true", "trainer.shared_prefixes=false"
    else:
        return rows
    if attention == "eager":
        why = f" needs sdpa, but this {config.model_type} model uses its own attention (eager)"
        hint = "the trainer's log says why it is not sdpa"
    else:
        why = f": a {config.model_type} model mixes positions by more than causal attention (sliding "
        why += "windows, soft-caps, recurrent layers), which cannot be divided"
        hint = "trainer.activation_checkpointing=full saves memory"
    raise ConfigError(f"{asked}{why}", hint=f"--set {without}; {hint}")


def runs(kernel: Kernel, decoder: PreTrainedModel, ranks: Ranks) -> bool:
    """Whether a kernel for GPUs gives the values and gradients of the one that runs everywhere, on all
    ranks."""
    config = decoder.config.get_text_config()
    if not getattr(config, "num_attention_heads", None):
        return False
    diff = float(ranks.max(kernel_diff(kernel, config, decoder.dtype, ranks)))
    if MAX_KERNEL_DIFF <= diff < math.inf:
        message = "attention by %s is not used: it differs by %.2g, relatively (at most %g)"
        logger.warning(message, kernel.__name__, diff, MAX_KERNEL_DIFF)
    return diff < MAX_KERNEL_DIFF


def sample_batch(vocab_size: int, device: torch.device) -> Microbatch:
    generator, rows = torch.Generator().manual_seed(0), list[list[int]]()
    for shared, own in SAMPLE:
        drawn = torch.randint(vocab_size, (own + 1,), generator=generator).tolist()
        rows.append([*(rows[-1][:shared] if rows else ()), *drawn])
    return scoring_microbatch(rows, device, is_tree=True)


@torch.no_grad()
def is_same(decoder: PreTrainedModel, divide: Divide, ranks: Ranks, attention: str = UNPADDED) -> bool:
    """Whether `divide`, with `attention`, gives a sample the same hidden states as sdpa of padded rows, up to
    rounding, on all ranks. If so, this attention stays set."""
    before = decoder.config._attn_implementation
    microbatch, found = sample_batch(int(decoder.config.get_text_config().vocab_size), ranks.device), []
    part = divide(microbatch)
    for implementation, tried in (("sdpa", padded(microbatch)), (attention, part)):
        decoder.set_attn_implementation(implementation)
        hidden = decoder(**tried.inputs, use_cache=False).last_hidden_state
        found.append(hidden.flatten(0, 1)[tried.select_n].float())
    expected, ours = part.of(found[0]), found[1]
    diffs = (ours - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)
    # a rank may have no token
    largest = torch.cat([diffs, diffs.new_zeros(1)]).nan_to_num(nan=torch.inf).max()
    diff, limit = float(ranks.max(largest)), MAX_TOKEN_DIFF[hidden.dtype]
    if not diff < limit:
        decoder.set_attn_implementation(before)
        name = "padded rows" if divide is padded else type(divide).__name__
        message = "%s with attention %s: a token's hidden state differs by %.2g, relatively (at most %g)"
        logger.warning(message, name, attention, diff, limit)
    return diff < limit


def kernel_diff(kernel: Kernel, config: Any, dtype: torch.dtype, ranks: Ranks) -> torch.Tensor:
    """The largest difference of a kernel from the one that runs everywhere, with the model's heads; infinite
    if it does not run."""
    microbatch = sample_batch(1 << 15, ranks.device)
    tree = microbatch.tree
    assert tree is not None
    # results of positions that are added for other ranks differ, and nobody reads them
    read = slice(len(tree.rows_P) if kernel is in_blocks else None)
    everywhere: Kernel = in_branches if kernel is in_blocks else in_padded_rows
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    each = heads, *[getattr(config, "num_key_value_heads", None) or heads] * 2
    found = []
    for one in (everywhere, kernel):
        rows = Unpadded(one, ranks)
        divide = rows if kernel is by_lengths else SharedPrefixes(rows, one, ranks)
        try:
            inputs, generator = divide(microbatch).inputs, torch.Generator().manual_seed(0)
            num_positions = inputs["input_ids"].numel() * ranks.sequence_size
            query, key, value = (
                torch.randn((num_positions, number, head_dim), generator=generator)
                .to(ranks.device, dtype)
                .requires_grad_()
                for number in each
            )
            attended = one(query, key, value, inputs["layout"], None)[read]
            gradients = torch.autograd.grad(attended.float().square().sum(), [query, key, value])
            found.append([attended, *gradients])
        except (RuntimeError, ValueError, TypeError, ImportError) as error:
            logger.warning("attention by %s does not run here: %s", one.__name__, first_line(error))
            return torch.tensor(torch.inf, device=ranks.device)
    diffs = [(ours - theirs).norm() / theirs.norm() for theirs, ours in zip(*found, strict=True)]
    return torch.stack(diffs).float().detach().nan_to_num(nan=torch.inf).max()
