"""Rows end to end, on one rank and divided between several, against the model's own result for one sequence
after the other."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, Qwen3Config

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.profile.schema import ProcessPlace, Profile, TrainerSection
from asyncrl_cli.train import division, packed_rows
from asyncrl_cli.train.batch import scoring_microbatch
from asyncrl_cli.train.logprobs import ForwardPass
from asyncrl_cli.train.policy_model import PolicyModel
from asyncrl_cli.train.ranks import Ranks

SIZES = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8)
CONFIG = Qwen3Config(**SIZES, num_attention_heads=4, num_key_value_heads=1)
SEQUENCES = [[3, 1, 4, 1, 5, 9, 2, 6], [3, 1, 4, 3, 5, 5], [8, 9], [8, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4]]
"""As a prefix tree, they have 19 positions: an odd number."""
ALONE = SimpleNamespace(rank=0, sequence_size=1, sequence=None)


def expected_of(model):
    """Logprobs of all tokens but the first ones, of one sequence after the other."""
    parts = []
    for tokens in SEQUENCES:
        logits = model(torch.tensor([tokens])).logits[0, :-1]
        parts.append(torch.distributions.Categorical(logits=logits).log_prob(torch.tensor(tokens[1:])))
    return torch.cat(parts)


def loss_of(logprobs):
    """Any function of all logprobs: tokens have gradients of their own."""
    return (logprobs * torch.linspace(-1, 2, len(logprobs))).exp().mean()


def one_row_after_the_other(
    query, key, value, starts_q, starts_k, longest_q, longest_k, *, scale, window_size, enable_gqa
):
    """What torch's kernel for CUDA computes, by its documentation."""
    assert window_size == (-1, 0)
    assert starts_q is starts_k
    assert starts_q.dtype == torch.int32
    assert longest_q == longest_k == starts_q.diff().max()
    assert enable_gqa == (query.shape[1] != key.shape[1])
    repeats, rows = query.shape[1] // key.shape[1], []
    for begin, end in pairwise(starts_q.tolist()):
        q, (k, v) = query[begin:end], (one[begin:end].repeat_interleave(repeats, 1) for one in (key, value))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        past = torch.ones(len(q), len(q), dtype=torch.bool).tril()
        rows.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~past, -torch.inf).softmax(-1), v))
    return torch.cat(rows)


def without_grouped_heads(query, key, value, starts_q, starts_k, longest_q, longest_k, *, scale, window_size):
    """The same in torch 2.11, which has no `enable_gqa`."""
    assert query.shape == key.shape == value.shape
    lengths = starts_q, starts_k, longest_q, longest_k
    return one_row_after_the_other(
        query, key, value, *lengths, scale=scale, window_size=window_size, enable_gqa=False
    )


@pytest.mark.parametrize(
    ("kernel", "of_torch"),
    [
        (packed_rows.in_padded_rows, None),
        (packed_rows.by_lengths, one_row_after_the_other),
        (packed_rows.by_lengths, without_grouped_heads),
    ],
    ids=["padded", "varlen", "varlen of torch 2.11"],
)
def test_rows_end_to_end_have_the_values_and_gradients_of_single_sequences(kernel, of_torch, monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", of_torch)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG).eval()
    expected = expected_of(model)
    loss_of(expected).backward()
    theirs = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    model.set_attn_implementation(packed_rows.UNPADDED)
    divide = packed_rows.Unpadded(kernel, ALONE)
    assert division.is_packed(divide) == (kernel is packed_rows.by_lengths)
    assert not division.is_packed(packed_rows.padded)
    batch = scoring_microbatch(SEQUENCES, torch.device("cpu"))
    assert divide(batch).inputs["input_ids"].numel() == sum(map(len, SEQUENCES)) - len(SEQUENCES)
    logprobs = ForwardPass(model, 1.0, divide)(batch).logprobs_N
    torch.testing.assert_close(logprobs, expected)
    loss_of(logprobs).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs[name], msg=name)


@pytest.mark.parametrize(
    ("config", "size", "words"),
    [
        (
            MistralConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, sliding_window=4),
            2,
            ["mistral", "sliding windows"],
        ),
        (CONFIG, 3, ["does not divide", "4 attention heads"]),
    ],
    ids=["sliding window", "heads"],
)
def test_models_whose_sequences_cannot_be_divided_are_refused(config, size, words):
    decoder = AutoModelForCausalLM.from_config(config).model
    ranks = SimpleNamespace(rank=0, sequence_size=size, device=torch.device("cpu"))
    with pytest.raises(ConfigError) as refused:
        division.choose_division(decoder, "sdpa", ranks)
    assert all(word in str(refused.value) for word in words)
    assert "trainer.sequence_parallel_size=1" in refused.value.hint


def test_a_model_that_has_to_use_its_own_attention_is_refused_for_that_reason():
    ranks = SimpleNamespace(rank=0, sequence_size=2, device=torch.device("cpu"))
    with pytest.raises(ConfigError, match="sequence_parallel_size = 2 needs sdpa") as refused:
        division.choose_division(AutoModelForCausalLM.from_config(CONFIG).model, "eager", ranks)
    assert "sliding windows" not in str(refused.value)


def test_a_kernel_is_as_far_off_as_its_values_and_infinitely_if_it_does_not_run(monkeypatch):
    def found():
        ranks = SimpleNamespace(**vars(ALONE), device=torch.device("cpu"))
        return division.kernel_diff(packed_rows.by_lengths, CONFIG, torch.float32, ranks).item()

    def exact(*arguments, scale, enable_gqa, **kwargs):
        return one_row_after_the_other(
            *arguments, scale=arguments[0].shape[-1] ** -0.5, enable_gqa=enable_gqa, **kwargs
        )

    def other(*arguments, enable_gqa, **kwargs):
        return 1.1 * exact(*arguments, enable_gqa=enable_gqa, **kwargs)

    def refusing(*_, **__):
        raise ValueError("heads of this size are not supported")

    def with_other_arguments(*, query):
        """Of a version of torch to come."""

    kernels = {"exact": exact, "other": other, "refusing": refusing, "unknown": with_other_arguments}
    diffs = {}
    for name, kernel in kernels.items():
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
        diffs[name] = found()
    assert diffs["exact"] < 1e-5
    assert diffs["other"] == pytest.approx(1.1**2 - 1, rel=1e-3)  # of gradients; of values it is 0.1
    assert diffs["refusing"] == diffs["unknown"] == float("inf")


def differences(directory: str, rank: int) -> list[tuple[float, float, float]]:
    """Of one of two ranks that divide sequences, for each way to compute layers again, as rows and as a tree:
    the largest differences of logprobs, of gradients, and the largest gradient."""
    torch.set_num_threads(1)
    device, init_method = torch.device("cpu"), f"file://{directory}/rendezvous"
    place = ProcessPlace(model_dir=directory, workers=2)
    ranks = Ranks(Profile(), place, rank=rank, init_method=init_method, sequence_size=2)
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    expected = expected_of(theirs)
    (2 * loss_of(expected)).backward()  # of two microbatches
    exact = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    largest, found = max(gradient.abs().max().item() for gradient in exact.values()), []
    ways = [("none", False), ("selective", False), ("selective", True), ("full", False), ("full", True)]
    for recompute, is_tree in ways:
        model = PolicyModel(
            Profile(trainer=TrainerSection(activation_checkpointing=recompute)), directory, ranks
        )
        batch = scoring_microbatch(SEQUENCES, device, is_tree=is_tree)
        off = (model.numbers_N(batch) - expected).abs().max().item()
        for is_last in (False, True):
            model.gathered.before_backward(is_last=is_last)
            (loss_of(model.scored(batch).logprobs_N) * ranks.world_size).backward()
        whole = {name: parameter.grad.full_tensor() for name, parameter in model.parameters.items()}
        found.append((off, max((whole[name] - exact[name]).abs().max().item() for name in exact), largest))
    ranks.close()
    return found


@pytest.mark.slow
def test_two_ranks_that_divide_sequences_have_the_logprobs_and_gradients_of_one(tmp_path, rank_context):
    """With a single key-value head for both."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIG).save_pretrained(tmp_path)
    with ProcessPoolExecutor(2, mp_context=rank_context) as processes:
        running = [processes.submit(differences, str(tmp_path), rank) for rank in range(2)]
        for logprobs, gradients, largest in (one for future in running for one in future.result(timeout=120)):
            assert logprobs < 1e-5
            assert gradients < 1e-5 < largest


@pytest.mark.slow
def test_ranks_that_divide_sequences_train_the_weights_of_one(tiny_model_dir, run_ranks):
    """Four ranks, two and two, with a critic: sums over trajectories count each of them once."""
    settings = {"adv_estimator": "gae", "lam": 0.95, "lr": 2e-5, "old_logprobs": "recompute"}
    (one,) = run_ranks(tiny_model_dir, settings, last_step=1)
    divided = settings | {"sequence_parallel_size": 2}
    (four,) = run_ranks(tiny_model_dir, divided, last_step=1, world_size=4)
    for name, ours in one.items():
        torch.testing.assert_close(four[name], ours, rtol=0, atol=1e-6)
