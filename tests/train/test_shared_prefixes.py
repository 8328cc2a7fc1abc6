"""Prefix trees against rows, and against the model's own result for one sequence after the other."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, Qwen3Config, Qwen3MoeConfig

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.contracts.prompt_group import AttemptKey, GroupResult
from asyncrl_cli.data.sample_fields import BUILT_IN
from asyncrl_cli.data.trajectories import GroupPayload, trajectory_of
from asyncrl_cli.measure.values import shown
from asyncrl_cli.models import attention
from asyncrl_cli.profile.algorithm_section import AlgorithmSection
from asyncrl_cli.train import division, shared_prefixes
from asyncrl_cli.train.batch import scoring_microbatch
from asyncrl_cli.train.logprobs import ForwardPass
from asyncrl_cli.train.packed_rows import UNPADDED, padded
from asyncrl_cli.train.prefix_trees import cut_trees
from tests.train.rank_program import MADE_UP
from tests.train.test_ranks_and_resume import ALGORITHMS
from tests.train.train_samples import OneRank, meta_of, save_tiny_model
from tests.trainers import rank_batch, trainer_parts

CPU = torch.device("cpu")
SIZES = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8)
CONFIG = Qwen3Config(**SIZES, num_attention_heads=4, num_key_value_heads=2)
WINDOW = MistralConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, sliding_window=4)
EXPERTS = Qwen3MoeConfig(
    **SIZES,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
)


def random_tree(seed: int, levels: int = 4, vocab_size: int = 61) -> list[np.ndarray]:
    """Sequences of a random tree, in random order: nodes of 1 to 9 tokens, up to three branches at each, some
    sequences that end inside of others, some twice, and one that shares nothing."""
    rng = np.random.default_rng(seed)
    leaves = list[np.ndarray]()

    def grow(prefix: np.ndarray, level: int) -> None:
        here = np.concatenate([prefix, rng.integers(vocab_size, size=rng.integers(1, 10))])
        branches = rng.integers(1, 4) if level < levels else 0
        for _ in range(branches):
            grow(here, level + 1)
        if not branches or rng.random() < 0.3:
            leaves.append(np.append(here, rng.integers(vocab_size)))

    for _ in range(rng.integers(1, 4)):
        grow(np.zeros(0, dtype=np.int64), 1)
    leaves += [leaves[0], rng.integers(vocab_size, size=3)]
    rng.shuffle(leaves)
    return [leaf.astype(np.int32) for leaf in leaves]


def unique_prefixes(sequences) -> int:
    """How many positions there are to compute, counted as what they are."""
    return len({tuple(one[: end + 1]) for one in sequences for end in range(len(one) - 1)})


def in_order(sequences):
    return sorted(one.tolist() for one in sequences)


def logprobs_of(model, divide, sequences):
    model.set_attn_implementation("sdpa" if divide is padded else UNPADDED)
    return ForwardPass(model, 1.0, divide)(scoring_microbatch(sequences, CPU, is_tree=True)).logprobs_N


def loss_of(logprobs):
    """Any function of all logprobs: tokens have gradients of their own."""
    return (logprobs * torch.linspace(-1, 2, len(logprobs))).exp().mean()


@pytest.mark.filterwarnings("ignore:flex_attention called without", "ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize(
    ("kernel", "config", "num_trees"),
    [
        (shared_prefixes.in_branches, CONFIG, 10),
        (shared_prefixes.in_branches, EXPERTS, 4),
        pytest.param(shared_prefixes.in_blocks, CONFIG, 1, marks=pytest.mark.slow),
    ],
)
def test_trees_have_the_logprobs_and_gradients_of_rows_and_each_prefix_once(
    kernel, config, num_trees, monkeypatch
):
    # FlexAttention refuses gradients on CPUs, where it would compute them without its kernels
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    divide = shared_prefixes.SharedPrefixes(padded, kernel, OneRank())
    for seed in range(num_trees):
        sequences = in_order(random_tree(seed))
        expected = logprobs_of(model, padded, sequences)
        names, weights = zip(*model.named_parameters(), strict=True)
        theirs = torch.autograd.grad(loss_of(expected), weights)
        batch = scoring_microbatch(sequences, CPU, is_tree=True)
        assert divide(batch).inputs["input_ids"].numel() == unique_prefixes(sequences)
        logprobs = logprobs_of(model, divide, sequences)
        torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
        ours = torch.autograd.grad(loss_of(logprobs), weights)
        for name, one, exact in zip(names, ours, theirs, strict=True):
            torch.testing.assert_close(one, exact, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("max_tokens", [10, 40, 10_000])
def test_microbatches_hold_every_row_once_within_the_budget_of_unique_positions(max_tokens):
    for seed in range(20):
        sequences = random_tree(seed)
        parts = cut_trees([one[:-1] for one in sequences], max_tokens)
        if not parts:
            assert max_tokens < 10_000 or unique_prefixes(sequences) > 0.9 * sum(
                len(o) - 1 for o in sequences
            )
            continue
        assert sorted(b for part in parts for b in part) == list(range(len(sequences)))
        for part in parts:
            assert len(part) == 1 or unique_prefixes([sequences[b] for b in part]) <= max_tokens
        if max_tokens == 10_000:
            assert len(parts) == 1


def test_rows_that_are_the_same_do_not_fill_a_microbatch_without_end():
    row = np.arange(2000)
    parts = cut_trees([row] * 64, 2048)
    assert sorted(b for part in parts for b in part) == list(range(64))
    assert max(len(part) * 2000 for part in parts) <= 8 * 2048


def make_groups(seed: int) -> tuple[list[GroupResult], list[GroupPayload]]:
    """Two groups, each of one tree: trajectories of two segments, whose second halves are sampled."""
    rng, metas, payloads = random.Random(seed), [], []
    for index in range(2):
        sequences = [one for one in random_tree(seed + index, vocab_size=64) if len(one) > 3]
        segments = []
        for tokens in sequences:
            versions = np.where(np.arange(len(tokens)) > len(tokens) // 2, 0, -1).astype(np.int32)
            logprobs = np.array([rng.gauss(-4.2, 0.3) if v == 0 else 0 for v in versions], dtype=np.float32)
            segments.append(dict(tokens=tokens, logprobs=logprobs, versions=versions, mask=versions == 0))
        trajectories = tuple(
            trajectory_of(pair, BUILT_IN, reward=float(at % 3 == 0), finish_reason="stop")
            for at, pair in enumerate(zip(segments[::2], segments[1::2], strict=False))
        )
        key = AttemptKey(f"prompt-{index}", 0, 0)
        own = tuple(meta_of(one) for one in trajectories)
        metas.append(GroupResult(key=key, trajectories=own, failures=(), failed_tokens=0, payload=None))
        payloads.append(GroupPayload(uid=key.uid, epoch=0, attempt=0, trajectories=trajectories))
    return metas, payloads


def gradients_of(trainer, **batch):
    """Of every optimizer step of a train step, policy and critic; and its metrics."""
    found = []
    for model, optimizer in ((trainer.model, trainer.optimizer), (trainer.critic, None)):
        if model is not None:
            optimizer = optimizer or model.optimizer

            def step(model=model, step=optimizer.step):
                found.append({n: p.grad.full_tensor().clone() for n, p in model.parameters.items()})
                return step()

            optimizer.step = step
    return found, shown(trainer.train(**batch).metrics)


MORE = [
    {"activation_checkpointing": "selective"},
    {"activation_checkpointing": "full", "max_tokens_per_microbatch": 90},
]


@pytest.mark.slow
def test_every_loss_and_estimator_has_the_gradients_and_metrics_of_rows(tmp_path, make_trainer):
    model_dir = save_tiny_model(tmp_path / "model")
    for algorithm in [*ALGORITHMS, *MORE]:
        if any(name in algorithm for name in MADE_UP):
            continue
        keys = {key: value for key, value in algorithm.items() if key in AlgorithmSection.model_fields}
        rows, trees = (
            gradients_of(
                make_trainer(trainer_parts(model_dir, shared_prefixes=shares, **algorithm | {"lr": 1e-9})),
                **rank_batch(*make_groups(3), num_minibatches=2, **keys),
            )
            for shares in (False, None)
        )
        for theirs, ours in zip(rows[0], trees[0], strict=True):
            for name, gradient in ours.items():
                torch.testing.assert_close(
                    gradient, theirs[name], rtol=0, atol=1e-5, msg=f"{algorithm}: {name}"
                )
        assert trees[1] == pytest.approx(rows[1], rel=1e-4, abs=1e-5), algorithm


def decoder_of(model_config):
    torch.manual_seed(0)
    decoder = AutoModelForCausalLM.from_config(model_config).eval().model
    decoder.set_attn_implementation("sdpa")
    return decoder


def made(model_config, **keys):
    return division.choose_division(decoder_of(model_config), "sdpa", OneRank(), **keys)


def test_prefixes_are_shared_unless_the_model_or_the_key_forbids_it():
    assert isinstance(made(CONFIG), shared_prefixes.SharedPrefixes)
    assert isinstance(made(EXPERTS), shared_prefixes.SharedPrefixes)
    assert made(CONFIG, shares=False) is padded
    assert made(WINDOW) is padded
    with pytest.raises(ConfigError, match=r"shared_prefixes = true: a mistral model .*sliding windows"):
        made(WINDOW, shares=True)


@pytest.mark.filterwarnings("ignore:flex_attention called without", "ignore:The .grad attribute of a Tensor")
def test_positions_that_are_added_for_other_ranks_do_not_count_against_a_kernel(monkeypatch, caplog):
    # as in the test of both kernels
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    two = OneRank()
    two.sequence_size = 2
    assert len(division.sample_batch(61, CPU).tree.rows_P) % 2, "one is added"
    assert division.runs(shared_prefixes.in_blocks, decoder_of(CONFIG), two)

    def doubled(*values):
        return 2 * shared_prefixes.in_branches(*values)

    monkeypatch.setattr(division, "in_blocks", doubled)
    monkeypatch.setitem(shared_prefixes.LAYOUTS, doubled, shared_prefixes.branches)
    assert not division.runs(doubled, decoder_of(CONFIG), two)
    assert "attention by doubled is not used: it differs by" in caplog.text


def test_rows_on_a_cpu_are_trained_in_bfloat16_with_attention_in_float32(monkeypatch):
    def recorded(module, query, *others, **how):
        seen.append(query.dtype)
        return sdpa(module, query, *others, **how)

    sdpa, seen = attention.sdpa_attention_forward, []
    monkeypatch.setattr(attention, "sdpa_attention_forward", recorded)
    for config, shares in ((CONFIG, False), (WINDOW, None)):
        decoder = decoder_of(config).bfloat16()
        assert division.choose_division(decoder, "sdpa", OneRank(), shares) is padded
        hidden = {}
        for dtype in (torch.bfloat16, torch.float32):
            seen.clear()
            hidden[dtype] = decoder.to(dtype)(input_ids=torch.arange(24)[None]).last_hidden_state
            assert set(seen) == {torch.float32}
        # (with a window of 4 it matters which mask the attention gets)
        decoder.set_attn_implementation("eager")
        exact = decoder(input_ids=torch.arange(24)[None]).last_hidden_state
        torch.testing.assert_close(hidden[torch.float32], exact, rtol=0, atol=1e-5)
        assert (hidden[torch.bfloat16] - exact).norm() < 0.02 * exact.norm()


def test_a_tree_that_is_wrong_is_noticed_at_the_start(monkeypatch):
    def seeing_siblings(tree, added, sequence):
        layout = own(tree, added, sequence)
        masks = [b.mask_b1qk if b.mask_b1qk is None else torch.ones_like(b.mask_b1qk) for b in layout.blocks]
        blocks = (replace(b, mask_b1qk=mask) for b, mask in zip(layout.blocks, masks, strict=True))
        return replace(layout, blocks=tuple(blocks))

    def of_a_sibling(tree, added, sequence):
        """Each branch reads the own keys of the row before in place of its own."""
        layout = own(tree, added, sequence)
        return replace(layout, blocks=tuple(replace(b, keys_bk=b.keys_bk.roll(1, 0)) for b in layout.blocks))

    own = shared_prefixes.branches
    for wrong in (seeing_siblings, of_a_sibling):
        monkeypatch.setitem(shared_prefixes.LAYOUTS, shared_prefixes.in_branches, wrong)
        assert made(CONFIG) is padded
    monkeypatch.undo()

    def from_zero(microbatch, rows_P, positions_P, *others):
        starts = positions_P - torch.tensor(microbatch.tree.shared)[rows_P]
        return share(microbatch, rows_P, starts, *others)

    share = shared_prefixes.rank_share
    monkeypatch.setattr(shared_prefixes, "rank_share", from_zero)
    assert made(CONFIG) is padded
