"""The sections [ref], [critic] and [reward_model]: further models of a run."""

from __future__ import annotations

from asyncrl_cli.profile.fields import NonNegativeInt, PathText, PositiveFloat, Section


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
