"""The section [algorithm]: advantages, loss, and corrections for data that older weights sampled. Also [ref],
[teacher], [critic] and [reward_model]: the additional models that an algorithm may need.

There are three policies: theta is being trained, prox is the weights at the start of the window, mu is the
sampler. Per token, u = theta / prox, w = prox / mu and r = theta / mu are ratios of probabilities. Keys use
verl's names where verl has them.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    """The two bounds of a band like "0.5_5.0". A plain number x means (0, x)."""
    if isinstance(threshold, str):
        low, high = map(float, threshold.split("_"))
        return low, high
    return 0.0, threshold


def _rising(band: str) -> str:
    low, high = bounds(band)
    if low >= high:
        raise ValueError("the first bound is not below the second")
    return band


Band = Annotated[
    str, Field(pattern=r"^\d+(\.\d+)?_\d+(\.\d+)?$", examples=["0.5_5.0"]), AfterValidator(_rising)
]
"""A lower and an upper bound of a ratio."""
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
Estimator = Literal["grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gae", "none"]
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
Kl = Literal["k1", "abs", "k2", "k3", "low_var_kl"]
"""Estimates of a KL divergence from one token (train/policy_loss.py)."""


class AlgorithmSection(Section):
    """Advantages, loss, and corrections for stale data."""

    adv_estimator: Estimator = "grpo"
    """How rewards become advantages. `grpo` compares a response with its group, `rloo` with the other
    responses of its group, `reinforce_plus_plus` with all responses of the optimizer step;
    `reinforce_plus_plus_baseline` subtracts the group's mean first. `gae` compares each token with the
    critic's prediction ([critic]). `none`: rewards are only measured, the policy learns from the teacher
    alone ([teacher])."""
    normalize_advantages: bool = True
    """`grpo`: divide by the group's standard deviation. `gae`: shift and scale the optimizer step's
    advantages to mean 0 and standard deviation 1."""
    gamma: Share = 1.0
    """`gae`: discount factor per sampled token."""
    lam: Ratio = 1.0
    """`gae`: 1 relies on the rewards alone (advantage = return - value), 0 on the critic's next value."""
    distill_coef: NonNegativeFloat = 1.0
    """With a teacher ([teacher]): each token's advantage gets distill_coef * (log teacher - log theta) added,
    after all else, or the loss its divergence (`distill_loss`). 0 only measures it (`distill/kl`)."""
    distill_loss: Literal["sampled", "full"] = "sampled"
    """What of policy and teacher is compared before each sampled token: the logprobs of that token, or their
    distributions over the whole vocabulary, by the exact reverse KL as a loss. `full` learns far more from a
    sample. Its teachers are in the trainer's processes, and score every microbatch again in each pass."""
    use_kl_loss: bool = False
    """Add kl_loss_coef * KL(theta, reference) to the loss. The reference ([ref]) is an additional model in
    the trainer's processes, or has its own processes (placement.tasks)."""
    kl_loss_coef: NonNegativeFloat = 0.001
    """`use_kl_loss`: weight of the KL term. 0 only measures the divergence (`ref/kl`)."""
    kl_loss_type: Kl = "low_var_kl"
    """`use_kl_loss`: the KL estimator. `k3` and `low_var_kl` (k3, clamped) are never negative. On average,
    the gradient of `k2` is that of the divergence and the gradient of `k1` is zero."""
    use_kl_in_reward: bool = False
    """Subtract kl_coef * KL(sampler, reference) from the reward: per token with `gae`, otherwise summed over
    the response."""
    kl_penalty: Kl = "k1"
    """`use_kl_in_reward`: the KL estimator."""
    kl_coef: NonNegativeFloat = 0.001
    """`use_kl_in_reward`: weight of the KL term; with `kl_target` its first value."""
    kl_target: PositiveFloat | None = None
    """`use_kl_in_reward`: the KL (`reward/kl`, nats per sampled token) that the weight of the KL term is led
    to: after each train step it rises or falls by at most a fifth of trajectories / kl_horizon (Ziegler et
    al. 2019), and falls by a fifth at most. `reward/kl_coef` shows it. Default: the weight is fixed."""
    kl_horizon: PositiveFloat = 10000.0
    """`kl_target`: how fast the weight follows, in trajectories. The smaller, the faster."""
    filter_groups: bool = False
    """DAPO's dynamic sampling: a group in which all rewards are equal is dropped, and another prompt takes
    its place."""
    max_num_gen_batches: PositiveInt = 10
    """`filter_groups`: the run stops after max_num_gen_batches * R groups in a row with equal rewards."""
    overlong_buffer_tokens: PositiveInt | None = None
    """DAPO's overlong shaping: the reward falls linearly over the last overlong_buffer_tokens before
    rollout.max_response_tokens. Single-turn tasks only."""
    overlong_penalty_factor: PositiveFloat = 1.0
    """`overlong_buffer_tokens`: the penalty of a response with rollout.max_response_tokens."""
    mask_truncated: bool = False
    """Do not train on responses cut off by a token or turn limit. They still count in their group's mean."""
    bootstrap_truncated: bool = False
    """`gae`: train responses cut off by a token or turn limit as unfinished ones (T-PPO's extended GAE). What
    the critic expects in a response's last state takes the place of its reward, and the critic learns from
    finished responses only."""
    loss_mode: str = "vanilla"
    """The policy's loss: `vanilla` (PPO's clipped ratio), `gspo`, `cispo`, `dppo`, `sapo` or `reinforce`.
    Packages can add others through the entry point group `asyncrl.losses`."""
    loss_agg_mode: Aggregation = "token-mean"
    """How the token losses of an optimizer step are aggregated: their mean, or the mean over trajectories of
    their sum, their mean, or their sum / rollout.max_response_tokens (Dr.GRPO). The GSPO and SAPO papers use
    seq-mean-token-mean."""
    entropy_coeff: NonNegativeFloat = 0.0
    """Subtract entropy_coeff * the entropy of the tokens' distributions from the loss, aggregated like the
    loss: a bonus for exploration. Above 0 the head's logits are computed twice. `train/entropy` shows the
    entropy in any case."""
    clip_ratio_low: PositiveFloat = 0.2
    """eps_low of the clipped ratio. `gspo`: about 3e-4. `dppo`: largest decrease of a token's probability,
    about 0.15."""
    clip_ratio_high: PositiveFloat = 0.28
    """eps_high of the clipped ratio. `gspo`: about 4e-4. `dppo`: largest increase of a token's probability,
    about 0.15."""
    clip_ratio_c: AboveOne | None = None
    """`vanilla`: dual clip. The loss of a token with advantage A < 0 is at most clip_ratio_c * |A|. verl's
    default is 3."""
    sapo_tau_pos: PositiveFloat = 1.0
    """`sapo`: steepness of the gate for positive advantages."""
    sapo_tau_neg: PositiveFloat = 1.05
    """`sapo`: steepness of the gate for negative advantages."""
    old_logprobs: Literal["rollout", "recompute", "loglinear"] = "rollout"
    """The proximal policy. `rollout` takes the sampler's logprobs (w = 1). `recompute` those of the window's
    first weights. `loglinear` interpolates between sampler and current weights by the token's age, without a
    forward pass."""
    rollout_is: Literal["none", "token", "sequence", "geometric"] = "token"
    """Importance weights w of the loss: per token, the product over the sequence, or the sequence's geometric
    mean."""
    rollout_is_threshold: AtLeastOne | Band | None = None
    """A number truncates weights at it (2.0 is usual); a band like "0.5_5.0" sets weights outside it to 0
    (IcePop). Quote a band: TOML reads 0.5_5 without quotes as the number 0.55."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the optimizer step's tokens."""
    rollout_rs: Rejection | None = None
    """Reject tokens, or whole sequences, where prox and mu differ too much. With L = log w: k1 = -L, k2 =
    L*L/2, k3 = w - 1 - L, per token, or as the sum, mean or maximum over the sequence. Where w is 1, r is
    used in its place."""
    rollout_rs_threshold: PositiveFloat | Band | None = None
    """The largest k2 or k3 that is kept. For k1: a band of the ratio like "0.5_2.0", or its upper bound x
    (the lower is 1/x)."""
    warn_effective_ratio: Ratio = 0.5
    """Warn when `correction/effective_ratio` (mean of five train steps) falls below this, once until it
    recovers. 0: never."""
    warn_kl: PositiveFloat = 0.1
    """Warn likewise when `correction/kl` (sampler to policy, nats per token) rises above this."""
    warn_ref_kl: PositiveFloat = 1.0
    """Warn likewise when `ref/kl` (policy to reference, nats per token) rises above this."""

    @property
    def has_reference(self) -> bool:
        return self.use_kl_loss or self.use_kl_in_reward

    @property
    def has_critic(self) -> bool:
        return self.adv_estimator == "gae"


class RefSection(Section):
    """The reference: a frozen model that the policy is compared with. It exists only with
    `algorithm.use_kl_loss` or `use_kl_in_reward`."""

    path: PathText | None = None
    """A local Hugging Face directory or a hub name, with the policy's vocabulary. Default: the run's initial
    weights."""


class TeacherSection(Section):
    """On-policy distillation: the policy learns to give its own responses the probabilities that a teacher
    gives them. A teacher is a frozen model in the trainer's processes, or has its own processes
    (placement.tasks)."""

    path: PathText | Annotated[dict[str, PathText], Field(min_length=1)] | None = None
    """A local Hugging Face directory or a hub name, with the policy's tokenizer, such as a run's export.
    Several teachers are a table, `{math = "/models/a", code = "/models/b"}`. Default: no teacher."""
    column: str | None = None
    """Several teachers: the column of a prompt's row that names its teacher, or a field in one
    (`column.field`)."""

    @property
    def paths(self) -> Mapping[str, str]:
        """The teachers' paths by name; one alone has the name ""."""
        return self.path if isinstance(self.path, dict) else {"": self.path} if self.path else {}


class CriticSection(Section):
    """The critic of `algorithm.adv_estimator = "gae"`: a transformer with a linear head that learns to
    predict each response's reward. Betas, weight decay and schedule are the trainer's."""

    path: PathText | None = None
    """Initial weights of the transformer: a local Hugging Face directory or a hub name, with the policy's
    vocabulary. Default: the policy's initial weights. The head starts at zero."""
    lr: PositiveFloat | None = None
    """Peak learning rate of AdamW. Default: trainer.lr."""
    grad_clip: PositiveFloat = 1.0
    """Largest global gradient norm."""
    cliprange_value: PositiveFloat = 0.5
    """Value clipping, around the value at the train step's start; the larger of the clipped and unclipped
    losses counts."""
    head_start_steps: NonNegativeInt = 0
    """Optimizer steps at the start of the run that train only the critic (verl's `critic_warmup`)."""


class RewardModelSection(Section):
    """The reward model: a sequence classifier with its own processes (`reward` in `placement.tasks`). It
    scores finished responses, of training and of evals. The score is the first logit for the conversation in
    the model's own chat template or, without a template, for prompt and response concatenated. Single-turn
    tasks only."""

    path: PathText | None = None
    """A local Hugging Face directory or a hub name. Default: no reward model. Its score is the whole reward,
    unless you set `task.reward`: then that reward is added."""
    weight: PositiveFloat = 1.0
    """Factor of the score in the reward."""
