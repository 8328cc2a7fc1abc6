"""Every function of the algorithm against a reference that was not written for it, in float64: TRL's code
where it has one, else the papers' formulas in NumPy (reference_losses.py), which the other tests use, too.

    python -m tests.train.test_against_trl    # prints docs/algorithms.md's table of the largest differences

TRL needs a newer `datasets` than verifiers takes, so it has an environment of its own: TRL_PYTHON names its
Python. `.ci/run` makes one. The tests use methods of TRL that are not public, so they are for one version.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch

from asyncrl_cli.profile.algorithm_section import AlgorithmSection, Kl
from asyncrl_cli.profile.rollout_sections import RolloutSection
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.train.batch import PROX, REF, Microbatch
from asyncrl_cli.train.critic import gae, value_loss
from asyncrl_cli.train.logprobs import Scored
from asyncrl_cli.train.losses import find_loss
from asyncrl_cli.train.policy_loss import PolicyLoss, correct, kl_of
from asyncrl_cli.train.step_plan import OptimizerStepPlan, advantages_of
from tests.train import reference_losses as reference
from tests.train.test_losses import CASES as LOSSES
from tests.train.test_losses import RULES, algorithm_of, batch_of, sequences_of

Sequences = list[dict[str, np.ndarray]]
Found = tuple[Any, Any]
"""Values, and their derivatives by the token's logprob (or value); None where there are none."""
TRL = "1.16"
PYTHON = os.environ.get("TRL_PYTHON", sys.executable)
ROOT = Path(__file__).parents[2]
MAX_TOKENS = 64
SEEDS = range(3)
OF_TRL = ("vanilla", "gspo", "cispo", "sapo")
"""Losses that the documented table holds against TRL's."""
WHOLE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "vanilla; token-mean": ({}, {"loss_type": "bnpo"}),
    "vanilla; seq-mean-token-mean": ({"loss_agg_mode": "seq-mean-token-mean"}, {"loss_type": "grpo"}),
    "vanilla; seq-mean-token-sum-norm": (
        {"loss_agg_mode": "seq-mean-token-sum-norm"},
        {"loss_type": "dr_grpo"},
    ),
    "gspo": (
        dict(
            loss_mode="gspo", loss_agg_mode="seq-mean-token-mean", clip_ratio_low=0.03, clip_ratio_high=0.04
        ),
        dict(loss_type="grpo", importance_sampling_level="sequence", epsilon_low=0.03, epsilon_high=0.04),
    ),
    "cispo": ({"loss_mode": "cispo", "clip_ratio_low": 1.0}, {"loss_type": "cispo", "epsilon_high": 1.28}),
    "sapo": (
        {"loss_mode": "sapo", "loss_agg_mode": "seq-mean-token-mean", "sapo_tau_neg": 1.25},
        {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.25},
    ),
    "vanilla with KL in the loss, k3": (
        {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "k3"},
        {"beta": 0.3},
    ),
    "rollout_is token, cut": ({"rollout_is_threshold": 1.2}, {"weights": ("token_truncate", None, 1.2)}),
    "rollout_is token, band": ({"rollout_is_threshold": "0.8_1.25"}, {"weights": ("token_mask", 0.8, 1.25)}),
    "rollout_is sequence, cut": (
        {"rollout_is": "sequence", "rollout_is_threshold": 1.5},
        {"weights": ("sequence_truncate", None, 1.5)},
    ),
    "rollout_is sequence, band": (
        {"rollout_is": "sequence", "rollout_is_threshold": "0.2_3.0"},
        {"weights": ("sequence_mask", 0.2, 3.0)},
    ),
}
"""The optimizer step's loss, by our keys and by TRL's (whose cispo has an upper bound of the ratio itself,
and whose temperatures are float32: 1.25 is exact there)."""


def ours(algorithm: AlgorithmSection, sequences: Sequences) -> Found:
    """The loss and its gradient of one of the trainer's optimizer steps, on one rank, with these logprobs for
    the model's."""
    batch, lengths = batch_of(sequences), torch.tensor([len(sequence["theta"]) for sequence in sequences])
    columns = {PROX: batch.logp_prox_N} | ({REF: batch.logp_mu_N} if algorithm.use_kl_loss else {})
    tokens_N = torch.arange(len(batch.rows_N))
    microbatch = Microbatch(
        inputs_BT=torch.zeros(len(lengths), int(lengths.max()) + 1, dtype=torch.long),
        lengths=tuple(lengths.tolist()),
        select_N=tokens_N,
        targets_N=torch.zeros_like(tokens_N),
        rows_N=batch.rows_N,
        logp_mu_N=batch.logp_mu_N,
        advantages_N=batch.advantages_N,
        staleness_N=torch.zeros_like(tokens_N),
        trajectory_tokens_N=lengths[batch.rows_N],
        order_N=tokens_N,
        columns=columns,
    )
    scored = Scored(batch.logp_theta_N, torch.zeros(len(tokens_N)))
    profile = Profile(algorithm=algorithm, rollout=RolloutSection(max_response_tokens=MAX_TOKENS))
    plan = OptimizerStepPlan(trajectories=(), num_loss_tokens=len(tokens_N), num_trajectories=len(lengths))
    loss, _ = PolicyLoss(profile)(microbatch, scored, plan, steps_done=0)
    loss.backward()
    return loss.item(), batch.logp_theta_N.grad


def trls(options: dict[str, Any], sequences: Sequences) -> Found:
    """The same by `GRPOTrainer._compute_loss` on padded rows, with the sampler's logprobs as the reference's,
    too."""
    from trl import GRPOConfig, GRPOTrainer

    lengths = [len(sequence["theta"]) for sequence in sequences]
    mask = torch.zeros(len(lengths), max(lengths), dtype=torch.float64)
    rows = {name: torch.zeros_like(mask) for name in ("theta", "prox", "mu")}
    for index, sequence in enumerate(sequences):
        mask[index, : lengths[index]] = 1
        for name, padded in rows.items():
            padded[index, : lengths[index]] = torch.as_tensor(sequence[name])
    rows["theta"].requires_grad_()
    inputs = {
        "prompt_ids": torch.zeros(len(lengths), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(lengths), 1),
        "completion_ids": torch.zeros(mask.shape, dtype=torch.long),
        "completion_mask": mask,
        "advantages": torch.tensor([sequence["advantage"][0] for sequence in sequences]),
        "old_per_token_logps": rows["prox"],
        "ref_per_token_logps": rows["mu"],
        "num_items_in_batch": mask.sum(),
    }
    if "weights" in options:
        inputs["importance_sampling_ratio"] = trls_weights(
            rows["prox"] - rows["mu"], mask, *options["weights"]
        )
    fixed = dict(
        loss_type="bnpo", importance_sampling_level="token", epsilon_low=0.2, epsilon_high=0.28, beta=0.0
    )
    fixed |= {"aux_loss_enabled": False, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None}
    fixed |= dict(
        current_gradient_accumulation_steps=1, _entropy_bonus_enabled=False, max_completion_length=MAX_TOKENS
    )
    fixed |= {"use_vllm": "weights" in options, "vllm_importance_sampling_correction": True}
    trainer = MagicMock(
        **(fixed | options), args=GRPOConfig(output_dir="unused", report_to=[], use_cpu=True, bf16=False)
    )
    trainer.args.use_bias_correction_kl = False  # the KL term is not weighed for stale data: kl.py
    trainer.args.steps_per_generation = trainer.accelerator.num_processes = 1
    for name in ("sapo_temperature_pos", "sapo_temperature_neg"):
        setattr(trainer.args, name, options.get(name, 1.0))
    trainer.accelerator.gather = trainer.accelerator.reduce = lambda tensor, **_: tensor
    trainer._get_per_token_logps_and_entropies.return_value = (rows["theta"], torch.zeros_like(mask), None)
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    return loss.item(), rows["theta"].grad[mask.bool()]


def trls_weights(
    log: torch.Tensor, mask: torch.Tensor, mode: str, low: float | None, high: float
) -> torch.Tensor:
    """The lines of TRL's `_generate_and_score_completions` for `vllm_importance_sampling_mode`, which are no
    function there."""
    ratio = torch.exp((log * mask).sum(-1, keepdim=True) if mode.startswith("sequence") else log * mask)
    if mode.endswith("truncate"):
        return torch.clamp(ratio, min=low, max=high)
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


def whole(case: str, sequences: Sequences) -> tuple[Found, Found]:
    keys, options = WHOLE[case]
    algorithm = AlgorithmSection(
        old_logprobs="recompute", **{"rollout_is": "token" if "weights" in options else "none"} | keys
    )
    return ours(algorithm, sequences), trls(options, sequences)


@pytest.mark.slow
def test_each_row_of_the_documented_table_is_so_and_the_losses_of_optimizer_steps_are_trls():
    found = table(table_by(PYTHON))
    assert all(float(number) < 1e-12 for row in found for number in row[2:] if number != "-"), found
    documented = table((ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8"))
    assert [(row[0], row[1].split()[0]) for row in documented] == [
        (row[0], row[1].split()[0]) for row in found
    ]


def table_by(python: str) -> str:
    """What this module prints where TRL is."""
    ask = "from importlib.metadata import version; print(version('trl'))"
    has = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=False)
    if not has.stdout.startswith(f"{TRL}."):
        pytest.skip(f"{python} does not have TRL {TRL} (TRL_PYTHON names another one)")
    command = [python, "-W", "ignore", "-m", "tests.train.test_against_trl"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def table(text: str) -> list[list[str]]:
    """The cells of the rows with a reference."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("| ")
    ]
    return [row for row in rows if len(row) == 4 and row[1].split()[0] in ("TRL", "NumPy")]


def test_the_papers_formulas_hold():
    found = {case: differences([of(seed) for seed in SEEDS]) for case, of in by_numpy()}
    assert not [case for case, numbers in found.items() if any(number > 1e-10 for number in numbers)], found


def differences(pairs: list[tuple[Found, Found]]) -> tuple[float, float]:
    """Largest difference of values and of derivatives (nan: there are none)."""

    def largest(index: int) -> float:
        both = [
            (np.asarray(a[index], dtype=float), np.asarray(b[index], dtype=float))
            for a, b in pairs
            if a[index] is not None
        ]
        return max((float(np.abs(a - b).max()) for a, b in both), default=math.nan)

    return largest(0), largest(1)


def by_numpy() -> Iterator[tuple[str, Callable[[int], tuple[Found, Found]]]]:
    """Functions, each for a seed."""
    for case in LOSSES:
        yield case, lambda seed, case=case: loss_of(case, sequences_of(seed))
    for level, threshold in (("geometric", 1.2), ("geometric", "0.8_1.25")):
        keys = {"rollout_is": level, "rollout_is_threshold": threshold}
        name = f"rollout_is {level}, {threshold}"
        yield name, lambda seed, keys=keys: weighted(sequences_of(seed), **keys)
    yield "rollout_rs, all rules", lambda seed: rejections(sequences_of(seed))
    for kind in typing.get_args(Kl):
        yield f"KL {kind}", lambda seed, kind=kind: kl(kind, seed)
    yield "gae", advantages_by_gae
    yield "the critic's loss", critics_loss
    for estimator, expected in ESTIMATORS.items():
        yield f"adv_estimator {estimator}", lambda seed, e=estimator, f=expected: estimated(e, f, seed)


def loss_of(case: str, sequences: Sequences) -> tuple[Found, Found]:
    algorithm, batch = algorithm_of(case), batch_of(sequences)
    loss_N, metrics = find_loss(algorithm.loss_mode)(batch, algorithm)
    if "correction/clipped_ratio" in metrics:
        share = metrics["correction/clipped_ratio"]
        assert 0 < share.amount < share.weight == len(loss_N)
    loss_N.sum().backward()
    values, slopes = map(
        np.concatenate, zip(*(LOSSES[case][1](sequence) for sequence in sequences), strict=True)
    )
    return (loss_N.detach(), batch.logp_theta_N.grad), (values, slopes)


def weighted(sequences: Sequences, **keys: Any) -> tuple[Found, Found]:
    found_N, _ = correct(batch_of(sequences), AlgorithmSection(old_logprobs="recompute", **keys))
    expected = [
        reference.weights(sequence, keys["rollout_is"], keys["rollout_is_threshold"])
        for sequence in sequences
    ]
    return (found_N, None), (np.concatenate(expected), None)


def rejections(sequences: Sequences) -> tuple[Found, Found]:
    found, expected = [], []
    for rule in RULES:
        threshold = 1.3 if rule.endswith("k1") else 0.1
        keys: dict[str, Any] = {"rollout_rs": rule, "rollout_rs_threshold": threshold, "rollout_is": "none"}
        found.append(
            correct(batch_of(sequences), AlgorithmSection(old_logprobs="recompute", **keys))[0].numpy()
        )
        expected += [reference.kept(sequence, rule, threshold) for sequence in sequences]
    return (np.concatenate(found), None), (np.concatenate(expected), None)


def kl(kind: Kl, seed: int) -> tuple[Found, Found]:
    policy, ref = np.random.default_rng(seed).normal(-2, 1.0, (2, 300))
    if kind == "low_var_kl":
        policy[:2], ref[:2] = [-25.0, -4.0], [-0.1, -0.1]  # beyond both of its limits
    logp_N = torch.tensor(policy, requires_grad=True)
    found_N = kl_of(kind, torch.tensor(ref) - logp_N)
    found_N.sum().backward()
    return (found_N.detach(), logp_N.grad), reference.kl(kind, policy, ref)


def advantages_by_gae(seed: int) -> tuple[Found, Found]:
    rewards, values = np.random.default_rng(seed).normal(0, 1, (2, 60))
    ends = np.array([7, 8, 30, 60])
    parts = [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    expected = [reference.gae(rewards[part], values[part], 0.99, 0.9) for part in parts]
    return (gae(rewards, values, ends, 0.99, 0.9), None), (np.concatenate(expected), None)


def critics_loss(seed: int) -> tuple[Found, Found]:
    values, old, returns = np.random.default_rng(seed).normal(0, 1, (3, 300))
    values_N = torch.tensor(values, requires_grad=True)
    loss_N, _ = value_loss(values_N, torch.tensor(old), torch.tensor(returns), 0.3)
    loss_N.sum().backward()
    return (loss_N.detach(), values_N.grad), reference.value_loss(values, old, returns, 0.3)


def _normalized(centred: np.ndarray) -> np.ndarray:
    return centred / (centred.std(ddof=1) + 1e-6)


def _centred(rewards: np.ndarray) -> np.ndarray:
    return rewards - rewards.mean(axis=1, keepdims=True)


ESTIMATORS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "grpo": lambda rewards: np.stack([_normalized(row) for row in _centred(rewards)]),
    "rloo": lambda rewards: rewards - (rewards.sum(axis=1, keepdims=True) - rewards) / (rewards.shape[1] - 1),
    "reinforce_plus_plus": lambda rewards: _normalized(rewards - rewards.mean()),
    "reinforce_plus_plus_baseline": lambda rewards: _normalized(_centred(rewards)),
}
"""By NumPy, from groups of the same size as rows."""


def estimated(estimator: Any, expected: Callable[[np.ndarray], np.ndarray], seed: int) -> tuple[Found, Found]:
    rewards = np.random.default_rng(seed).normal(0, 1, (6, 8))
    found = advantages_of(rewards.tolist(), AlgorithmSection(adv_estimator=estimator))
    return (np.array(found), None), (expected(rewards), None)


def main() -> None:
    sys.modules["vllm"] = None  # type: ignore[assignment]  # TRL would import it, which takes seconds
    import trl

    rows = [
        (case, f"TRL {trl.__version__}", lambda seed, c=case: whole(c, sequences_of(seed))) for case in WHOLE
    ]
    rows += [(case, "NumPy", of) for case, of in sorted(by_numpy()) if case not in OF_TRL]
    print("| function | reference | values | gradients |\n|---|---|---|---|")
    for case, who, of in rows:
        value, gradient = differences([of(seed) for seed in SEEDS])
        print(f"| {case} | {who} | {value:.0e} | {'-' if math.isnan(gradient) else f'{gradient:.0e}'} |")


if __name__ == "__main__":
    main()
