"""The section [algorithm]: advantages, loss, and corrections for data that older weights sampled; and [ref], [critic] and
[reward_model], the further models that these may ask for.

Three policies: theta is being trained, prox are the weights at the start of the window, mu is the sampler. Per token
u = theta / prox, w = prox / mu and r = theta / mu are ratios of probabilities. Keys have verl's names where it has them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from asyncrl_cli.profile.fields import (
    AboveOne,
    AtLeastOne,
    NonNegativeFloat,
    NonNegativeInt,
    PathText,
    PositiveFloat,
    PositiveInt,
    Ratio,
    Section,
    Share,
)


def bounds(threshold: float | str) -> tuple[float, float]:
    """The bounds of a band "0.5_5.0"; of a number, 0 and that number."""
    if isinstance(threshold, str):
        low, high = map(float, threshold.split("_"))
        return low, high
    return 0.0, threshold


def _rising(band: str) -> str:
    low, high = bounds(band)
    if low >= high:
        raise ValueError("the first bound is not below the second")
    return band


Band = Annotated[str, Field(pattern=r"^\d+(\.\d+)?_\d+(\.\d+)?$", examples=["0.5_5.0"]), AfterValidator(_rising)]
"""Two bounds of a ratio."""
Rejection = Literal[
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
]
Kl = Literal["k1", "abs", "k2", "k3", "low_var_kl"]
"""Estimates of a KL divergence from one token (train/kl.py)."""


class AlgorithmSection(Section):
    """Advantages, loss, and corrections for stale data."""

    adv_estimator: Literal["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae"] = "grpo"
    """How rewards become advantages: `grpo` compares a response with its group, `rloo` with the others of its group,
    `reinforce_plus_plus` with the optimizer step's responses, its `_baseline` first with its group; `gae` compares each token
    with what the critic expects ([critic])."""
    normalize_advantages: bool = True
    """`grpo`: divide by the group's standard deviation; `gae`: shift and scale the optimizer step's advantages to mean 0 and
    standard deviation 1."""
    gamma: Share = 1.0
    """`gae`: what a reward is worth one sampled token earlier."""
    lam: Ratio = 1.0
    """`gae`: 1 trusts rewards alone (advantage = return - value), 0 the critic's next value."""
    use_kl_loss: bool = False
    """Add kl_loss_coef * KL(theta, reference) to the loss. The reference ([ref]) is one more model in the trainer, or
    has processes of its own (placement.tasks)."""
    kl_loss_coef: NonNegativeFloat = 0.001
    """`use_kl_loss`: its weight; 0 only measures the divergence (`ref/kl`)."""
    kl_loss_type: Kl = "low_var_kl"
    """`use_kl_loss`: the estimate. `k3` and `low_var_kl` (k3 within limits) are never negative; `k2` has the divergence's gradient
    on average; `k1` has none on average."""
    use_kl_in_reward: bool = False
    """Take kl_coef * KL(sampler, reference) from the reward: with `gae` from each token's, else from the response's as a sum."""
    kl_penalty: Kl = "k1"
    """`use_kl_in_reward`: the estimate."""
    kl_coef: NonNegativeFloat = 0.001
    """`use_kl_in_reward`: its weight."""
    filter_groups: bool = False
    """DAPO's dynamic sampling: groups in which all rewards are equal are dropped, and another prompt takes the place."""
    max_num_gen_batches: PositiveInt = 10
    """`filter_groups`: the run stops after so many times R groups in a row with equal rewards."""
    overlong_buffer_tokens: PositiveInt | None = None
    """DAPO's overlong shaping: within that many tokens of rollout.max_response_tokens the reward falls in a straight line. For
    tasks of one turn."""
    overlong_penalty_factor: PositiveFloat = 1.0
    """What a response of rollout.max_response_tokens loses by overlong_buffer_tokens."""
    mask_truncated: bool = False
    """Responses that a limit cut off, of tokens or of turns, count in their group's mean, but are not trained."""
    loss_mode: str = "vanilla"
    """The policy's loss: `vanilla` (PPO's clipped ratio), `gspo`, `cispo`, `dppo`, `sapo` or `reinforce`. Packages add others as
    entry points `asyncrl.losses`."""
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = "token-mean"
    """How token losses become the optimizer step's: their mean, or a mean over trajectories of their sums, their means, or their
    sums / rollout.max_response_tokens (Dr.GRPO). The papers of gspo and sapo use seq-mean-token-mean."""
    clip_ratio_low: PositiveFloat = 0.2
    """eps_low of the clipped ratio. `gspo`: about 3e-4; `dppo`: largest fall of a token's probability, about 0.15."""
    clip_ratio_high: PositiveFloat = 0.28
    """eps_high of the clipped ratio. `gspo`: about 4e-4; `dppo`: largest rise of a token's probability, about 0.15."""
    clip_ratio_c: AboveOne | None = None
    """`vanilla`: dual clip. A token with a negative advantage loses at most this times its size; verl's default is 3."""
    sapo_tau_pos: PositiveFloat = 1.0
    """`sapo`: steepness of the gate for positive advantages."""
    sapo_tau_neg: PositiveFloat = 1.05
    """`sapo`: steepness of the gate for negative advantages."""
    old_logprobs: Literal["rollout", "recompute", "loglinear"] = "rollout"
    """The proximal policy: `rollout` takes the sampler's logprobs (w = 1), `recompute` those of the window's first weights,
    `loglinear` estimates them between sampler and current weights by the token's age, without a pass."""
    rollout_is: Literal["none", "token", "sequence", "geometric"] = "token"
    """Importance weights w of the loss: of each token, of its whole sequence, or the sequence's geometric mean."""
    rollout_is_threshold: AtLeastOne | Band | None = None
    """Weights above it are cut to it (2.0 is usual), or with a band like "0.5_5.0" those outside are 0 (IcePop).
    (TOML reads 0.5_5 without quotes as the number 0.55.)"""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the optimizer step's tokens."""
    rollout_rs: Rejection | None = None
    """Tokens, or whole sequences, that are not trained because prox and mu differ too much there. With L = log w: k1 = -L,
    k2 = L*L/2, k3 = w - 1 - L, of each token or as the sequence's sum, mean or maximum. Where w is 1, r takes its place."""
    rollout_rs_threshold: PositiveFloat | Band | None = None
    """Largest k2 or k3; for k1 a band of the ratio like "0.5_2.0", or its upper bound alone (1/x is the lower one then)."""
    warn_effective_ratio: Ratio = 0.5
    """A smaller `correction/effective_ratio` (mean of five train steps) is warned of, once until it has recovered; 0: never."""
    warn_kl: PositiveFloat = 0.1
    """A larger `correction/kl` (sampler to policy, nats per token) is warned of likewise."""
    warn_ref_kl: PositiveFloat = 1.0
    """A larger `ref/kl` (policy to reference, nats per token) is warned of likewise."""

    @property
    def has_reference(self) -> bool:
        return self.use_kl_loss or self.use_kl_in_reward

    @property
    def has_critic(self) -> bool:
        return self.adv_estimator == "gae"


class RefSection(Section):
    """The reference: a frozen model that the policy is compared with. There is one only if `algorithm.use_kl_loss` or
    `use_kl_in_reward` asks for it."""

    path: PathText | None = None
    """A local Hugging Face directory or a hub name, with the policy's vocabulary; the run's initial weights if not given."""


class CriticSection(Section):
    """The critic of `algorithm.adv_estimator = "gae"`: a transformer with a linear head, which learns what each response will earn.
    Betas, weight decay and schedule are the trainer's."""

    path: PathText | None = None
    """A local Hugging Face directory or a hub name, with the policy's vocabulary, from which the transformer begins; the policy's
    initial weights if not given. The head begins at zero."""
    lr: PositiveFloat | None = None
    """Peak learning rate of AdamW; trainer.lr if not given."""
    grad_clip: PositiveFloat = 1.0
    """Largest global gradient norm."""
    cliprange_value: PositiveFloat = 0.5
    """How far a value may go from that at the train step's start before the larger of both losses counts."""
    head_start_steps: NonNegativeInt = 0
    """Optimizer steps at the run's beginning in which only the critic learns (verl's `critic_warmup`)."""


class RewardModelSection(Section):
    """The reward model: a sequence classifier that scores finished responses, and those of evals, in processes of its own (`reward`
    in `placement.tasks`). Its score is the first logit, of the conversation in its own chat template; without a template, of prompt
    and response end to end. For tasks of one turn."""

    path: PathText | None = None
    """A local Hugging Face directory or a hub name; no reward model if not given. Alone it gives the whole reward; what a
    `task.reward` that you name gives is added."""
    weight: PositiveFloat = 1.0
    """How many times its score counts."""
