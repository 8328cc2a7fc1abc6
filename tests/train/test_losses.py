"""Losses and corrections against their formulas in NumPy (reference_losses.py): values, gradients, and what
must not matter."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.measure.values import shown
from asyncrl_cli.profile.algorithm_section import AlgorithmSection
from asyncrl_cli.train.losses import LOSSES, LossBatch, Metric, check_loss, find_loss, max_of, mean_of, sum_of
from asyncrl_cli.train.optimizer import reduced
from asyncrl_cli.train.policy_loss import correct, loglinear_prox
from tests.train import reference_losses as reference
from tests.train.train_samples import OneRank

LOW, HIGH, DUAL = 0.2, 0.28, 1.5
CASES = {
    "vanilla": ({}, lambda s: reference.vanilla(s, LOW, HIGH)),
    "vanilla, dual clip": ({"clip_ratio_c": DUAL}, lambda s: reference.vanilla(s, LOW, HIGH, DUAL)),
    "gspo": ({"clip_ratio_low": 0.03, "clip_ratio_high": 0.04}, lambda s: reference.gspo(s, 0.03, 0.04)),
    "cispo": ({}, lambda s: reference.cispo(s, LOW, HIGH)),
    "dppo": ({"clip_ratio_low": 0.05, "clip_ratio_high": 0.06}, lambda s: reference.dppo(s, 0.05, 0.06)),
    "sapo": ({"sapo_tau_neg": 1.3}, lambda s: reference.sapo(s, 1.0, 1.3)),
    "reinforce": ({}, reference.reinforce),
}
RULES = ["token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3"]
RULES += ["seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3"]


def sequences_of(seed: int, lengths=(40, 1, 25, 60, 12, 31, 18, 9, 22, 5)) -> list[dict[str, np.ndarray]]:
    """Sequences whose advantage is of the whole sequence, as a group's trajectories have it."""
    rng = np.random.default_rng(seed)
    made = []
    for length in lengths:
        theta, prox, mu = (rng.normal(-1.5, 0.3, length) for _ in range(3))
        made.append({"theta": theta, "prox": prox, "mu": mu, "advantage": np.full(length, rng.normal())})
    return made


def batch_of(sequences) -> LossBatch:
    joined = {
        name: torch.as_tensor(np.concatenate([s[name] for s in sequences]))
        for name in ("theta", "prox", "mu", "advantage")
    }
    lengths = torch.tensor([len(s["theta"]) for s in sequences])
    return LossBatch(
        logp_theta_N=joined["theta"].requires_grad_(),
        logp_prox_N=joined["prox"],
        logp_mu_N=joined["mu"],
        advantages_N=joined["advantage"],
        rows_N=torch.repeat_interleave(torch.arange(len(sequences)), lengths),
        num_rows=len(sequences),
        entropy_N=torch.zeros(0),
    )


def algorithm_of(case: str, **keys) -> AlgorithmSection:
    return AlgorithmSection(loss_mode=case.split(",")[0], **CASES[case][0], **keys)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), case=st.sampled_from([case for case in CASES if case != "reinforce"]))
def test_with_one_policy_every_loss_has_the_plain_policy_gradient(seed, case):
    sequences = [
        sequence | {"prox": sequence["theta"], "mu": sequence["theta"]} for sequence in sequences_of(seed)
    ]
    algorithm = algorithm_of(case, old_logprobs="recompute", rollout_is_threshold="0.9_1.1")
    batch = batch_of(sequences)
    factors_N, _ = correct(batch, algorithm)
    assert (factors_N == 1).all()
    (find_loss(algorithm.loss_mode)(batch, algorithm)[0] * factors_N).sum().backward()
    np.testing.assert_allclose(
        batch.logp_theta_N.grad, -np.concatenate([s["advantage"] for s in sequences]), rtol=1e-9
    )


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    case=st.sampled_from(list(CASES)),
    level=st.sampled_from(["token", "sequence", "geometric"]),
)
def test_the_order_of_sequences_and_how_they_are_cut_into_batches_change_nothing(seed, case, level):
    sequences, algorithm = sequences_of(seed), algorithm_of(case, old_logprobs="recompute", rollout_is=level)

    def losses_of(part):
        batch = batch_of(part)
        return (
            (find_loss(algorithm.loss_mode)(batch, algorithm)[0] * correct(batch, algorithm)[0])
            .detach()
            .split([len(s["theta"]) for s in part])
        )

    whole = losses_of(sequences)
    for found, expected in zip(
        [*losses_of(sequences[2:]), *losses_of(sequences[:2])], [*whole[2:], *whole[:2]], strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("level", ["none", "token", "sequence", "geometric"])
@pytest.mark.parametrize("threshold", [None, 1.2, "0.8_1.25"])
def test_importance_weights(level, threshold):
    sequences = sequences_of(1, lengths=(3, 5, 40, 1))
    algorithm = AlgorithmSection(old_logprobs="recompute", rollout_is=level, rollout_is_threshold=threshold)
    found_N, metrics = correct(batch_of(sequences), algorithm)
    expected = np.concatenate([reference.weights(sequence, level, threshold) for sequence in sequences])
    np.testing.assert_allclose(found_N, expected, rtol=1e-10)
    assert not found_N.requires_grad
    if level != "none":
        plain = np.concatenate([reference.weights(sequence, level, None) for sequence in sequences])
        assert metrics["correction/weight_max"].amount.item() == pytest.approx(plain.max())
        outside = "correction/masked_ratio" if isinstance(threshold, str) else "correction/truncated_ratio"
        if threshold is not None:
            assert metrics[outside].amount == np.sum(expected != plain) > 0


def test_reinforce_is_weighed_by_theta_over_mu_and_the_others_need_no_weight_where_prox_is_the_sampler():
    sequences = sequences_of(2)
    found_N, _ = correct(
        batch_of(sequences), AlgorithmSection(loss_mode="reinforce", rollout_is_threshold=1.1)
    )
    np.testing.assert_allclose(
        found_N, np.concatenate([reference.weights(s, "token", 1.1, "theta") for s in sequences])
    )
    assert (correct(batch_of(sequences), AlgorithmSection())[0] == 1).all()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("old_logprobs", ["rollout", "recompute"])
def test_rejection(rule, old_logprobs):
    sequences = sequences_of(3, lengths=(2, 3, 30, 1, 8, 8, 4))
    values = {"seq_sum": 0.6, "seq_max": 0.25}
    threshold = 1.3 if rule.endswith("k1") else values.get(rule[:-3], 0.05)
    newer = "theta" if old_logprobs == "rollout" else "prox"
    for bound in (threshold, "0.7_1.2") if rule.endswith("k1") else (threshold,):
        algorithm = AlgorithmSection(
            old_logprobs=old_logprobs, rollout_is="none", rollout_rs=rule, rollout_rs_threshold=bound
        )
        found_N, metrics = correct(batch_of(sequences), algorithm)
        expected = np.concatenate([reference.kept(sequence, rule, bound, newer) for sequence in sequences])
        np.testing.assert_array_equal(found_N.bool(), expected)
        assert 0 < metrics["correction/rejected_ratio"].amount == np.sum(~expected) < len(expected)


def test_the_loglinear_prox_lies_between_sampler_and_policy_by_the_steps_made():
    theta_N, mu_N = torch.tensor([-1.0, -1.0, -1.0, -1.0]), torch.tensor([-2.0, -2.0, -3.0, -2.0])
    staleness_N = torch.tensor([0, 1, 2, 1])
    # Windows of 4 optimizer steps. After 1 step of this window: prox is 4 of 5, 8 of 9 steps away from the
    # sampler.
    found_N = loglinear_prox(theta_N, mu_N, staleness_N, steps_done=1, window_steps=4)
    torch.testing.assert_close(found_N, torch.tensor([-2.0, -2 + 4 / 5, -3 + 2 * 8 / 9, -2 + 4 / 5]))
    before_any_step_N = loglinear_prox(theta_N, mu_N, staleness_N, steps_done=0, window_steps=4)
    torch.testing.assert_close(before_any_step_N[1:], theta_N[1:])


def test_figures_are_reduced_by_their_kind_whatever_their_names():
    seen = []
    for values in ([1.0, 2.0], [], [6.0]):
        values_N = torch.tensor(values)
        seen.append({"a": sum_of(values_N), "b": mean_of(values_N), "c": max_of(values_N)})
    assert shown(reduced(OneRank(), seen)) == {"a": 9.0, "b": 3.0, "c": 6.0}


def test_of_no_tokens_at_all_a_mean_is_absent():
    seen = [{"mean": mean_of(torch.zeros(0)), "max": Metric(kind="max", amount=torch.tensor(-math.inf))}]
    assert shown(reduced(OneRank(), seen)) == {"max": -math.inf}


def test_an_unknown_loss_is_refused_with_those_that_are_known():
    with pytest.raises(ConfigError, match='loss_mode = "vanila" is not known') as refused:
        check_loss("vanila")
    assert "vanilla" in refused.value.hint
    assert {find_loss(name).__name__ for name in LOSSES} == set(LOSSES)
