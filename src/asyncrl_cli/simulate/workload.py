"""The keys of a workload: how long a model's work takes, in physical units, and how much of it there is.

A workload does not contain any profile's speed: a simulation, which runs the loop's own code on a virtual clock, finds it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from asyncrl_cli.profile.fields import Bytes, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Ratio, Section, Share
from asyncrl_cli.profile.file_schema import DEFINITIONS, DIALECT, profile_schema, tidied

Tables = Annotated[dict[str, Any], Field(default_factory=dict)]
FromList = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)


class Lengths(Section):
    """How long prompts and responses are. Responses never exceed the profile's `rollout.max_response_tokens`."""

    prompt_tokens: NonNegativeInt = 128
    """Tokens of every prompt."""
    distribution: Literal["lognormal", "list"] = "lognormal"
    """`lognormal` (median and sigma) or `list` (drawn from `response_tokens`, which is how a run's own lengths are kept)."""
    median_tokens: PositiveFloat | None = None
    """Median of the lognormal before it is truncated."""
    sigma: NonNegativeFloat | None = None
    """Standard deviation of the logarithm."""
    prompt_variance_ratio: Ratio = 0.0
    """Share of the logarithm's variance that lies between prompts; the rest lies between the trajectories of one prompt."""
    response_tokens: Annotated[tuple[PositiveInt, ...], FromList] = ()
    """The list: one entry per observed trajectory."""


class Drawn(Section):
    """A figure that differs from case to case: lognormal, or drawn from a list."""

    median: PositiveFloat | None = None
    """Median of the lognormal."""
    sigma: NonNegativeFloat = 0.0
    """Standard deviation of its logarithm; 0: always the median."""
    values: Annotated[tuple[NonNegativeFloat, ...], FromList] = ()
    """The list, in place of a median."""

    @model_validator(mode="after")
    def _is_either(self) -> Drawn:
        if (self.median is None) == (not self.values):
            raise ValueError("needs a median (and sigma), or values: one of the two")
        return self


class Turns(Section):
    """Trajectories of several turns: after each but the last one the model waits for a tool and sees its result. `[lengths]` are
    then those of a turn. A tool that takes longer than the profile's `env.tool_timeout_s` fails its trajectory; `env.max_turns` and
    `env.max_context_tokens` end one."""

    number: Drawn
    """Turns of a trajectory, rounded, at least 1."""
    tool_s: Drawn
    """Seconds from the end of a turn to the beginning of the next."""
    result_tokens: Drawn
    """Tokens that a tool's result adds to the context, with what the chat template puts around it."""


class Decoding(Section):
    """Continuous batching in one rollout worker: a decode step takes `step_s + step_s_per_sequence * running`."""

    step_s: PositiveFloat
    """Seconds of a decode step that do not depend on what runs (reading the weights, launching kernels)."""
    step_s_per_sequence: NonNegativeFloat
    """Seconds that each running sequence adds to a decode step."""
    prefill_s_per_token: NonNegativeFloat = 0.0
    """Seconds per prompt token (and per token that recompute-kv fills in again)."""
    speed_spread: Ratio = 0.0
    """Workers differ: each worker's times are scaled by a factor uniform in 1 +- this."""
    interference_ratio: NonNegativeFloat = 0.0
    """How much slower generation is while the trainer computes, where both share a machine: 0.2 is 20% longer."""
    crowding_ratio: NonNegativeFloat | None = None
    """How much slower a worker is beside other workers, where several fill one machine (colocate on CPUs). Default: as much as
    beside the trainer (`interference_ratio`)."""


class Memory(Section):
    """GPU memory of a rollout worker. Its KV cache has what the engine's share leaves beside `syncing.parameter_bytes`."""

    gpu_memory_gib: PositiveFloat
    """Memory of one GPU, in GiB; a worker has `placement.gpus_per_rollout_worker` of them."""
    gpu_memory_utilization: Share = 0.9
    """Share of it that the engine may use, as `rollout.gpu_memory_utilization`."""
    kv_bytes_per_token: PositiveInt
    """Bytes of one token's keys and values, over all layers."""
    block_tokens: PositiveInt = 16
    """Tokens in a block of the cache."""


class Rewarding(Section):
    """From the last token of a trajectory to its reward."""

    latency_s: NonNegativeFloat = 0.0
    """Mean seconds."""
    latency_spread: Ratio = 0.0
    """Uniform in mean * (1 +- this)."""
    equal_ratio: Ratio = 0.0
    """Share of prompts whose trajectories all get the same reward, which `algorithm.filter_groups` leaves out."""


class Training(Section):
    """An optimizer step takes `fixed_step_s + (step_s + tokens * s_per_token) * (gpus / reference_gpus) ** -scaling_exponent`."""

    step_s: NonNegativeFloat = 0.0
    """Seconds of an optimizer step that do not depend on its tokens, on `reference_gpus`."""
    s_per_token: NonNegativeFloat
    """Seconds per trained token (prompt and response), on `reference_gpus`."""
    old_logprob_s_per_token: NonNegativeFloat = 0.0
    """Seconds per token of the old-logprob pass (`algorithm.old_logprobs = "recompute"`), on `reference_gpus`."""
    ref_s_per_token: NonNegativeFloat | None = None
    """Seconds per token of the reference's logprobs (`algorithm.use_kl_loss`, `use_kl_in_reward`), on `reference_gpus`, which the
    old-logprob pass's exponent scales; a third of `s_per_token` if not given: forward without backward."""
    reward_s_per_token: NonNegativeFloat | None = None
    """The same for the reward model's scores (`reward_model.path`), which are of whole sequences."""
    critic_s_per_token: NonNegativeFloat | None = None
    """The same for the critic's values (`algorithm.adv_estimator = "gae"`); what it learns takes three times as long."""
    reference_gpus: PositiveInt = 1
    """Devices of the trainer at which the figures hold; ranks count as devices on CPUs."""
    scaling_exponent: NonNegativeFloat = 1.0
    """1: twice the devices halve the time; 0: more devices do not help."""
    old_logprob_scaling_exponent: NonNegativeFloat = 1.0
    """The same for the old-logprob pass."""
    fixed_step_s: NonNegativeFloat = 0.0
    """Seconds of an optimizer step that no further device shortens: its longest sequence, which one device computes, and
    communication."""
    old_logprob_fixed_step_s: NonNegativeFloat = 0.0
    """The same for each mini-batch of the old-logprob pass."""
    step_overhead_s: NonNegativeFloat = 0.0
    """Seconds per train step that no device shortens (taking the batch, advantages, moving payloads); the trainer's timing counts
    them as `other`."""
    interference_ratio: NonNegativeFloat = 0.0
    """How much longer a train step takes while rollouts run, where both share a machine."""
    crowding_ratio: NonNegativeFloat | None = None
    """How much slower a rank is beside other ranks, where several fill one machine (colocate on CPUs). Default: as much as beside
    the rollouts (`interference_ratio`)."""


class Syncing(Section):
    """Gather, send and load of one version, from bytes and bandwidths."""

    parameter_bytes: Bytes
    """Bytes of the published weights."""
    gather_bytes_per_s: Bytes
    """Trainer gathers full parameters into buckets (stalls training)."""
    send_bytes_per_s: Bytes
    """Buckets are sent to a worker's second buffer (stalls nobody)."""
    load_bytes_per_s: Bytes
    """A worker copies received weights into its model (stalls the worker)."""
    pause_s: NonNegativeFloat = 0.0
    """Fixed cost of interrupting and resuming a worker."""
    colocated_s: NonNegativeFloat = 0.0
    """Colocate: seconds per window to hand the devices over (sleep, wake, resharding), in place of a gather, send and load."""


class Reference(Section):
    """A measured row that the workload was calibrated on, or is compared with."""

    profile: str
    """Profile that was measured."""
    set: Tables
    """Profile keys that differ from the workload's own `[profile]`."""
    window_time_s: PositiveFloat
    """Measured seconds per window of W groups."""
    parts_s: Tables
    """Measured seconds per window of some parts: keys are those of `timing/*_s` without prefix and unit, as wait_data, train."""
    calibrated: bool = True
    """Whether the parameters were fitted to this row (false: it only checks a prediction)."""
    source: str = ""
    """Where it comes from."""
    evidence: Literal["measured", "published"] = "measured"
    """`published` if somebody else measured it."""


class Workload(Section):
    """A model's work on some hardware. Made by `simulate.workload_files.load_workload`."""

    schema_version: Literal[1] = 1
    """Version of this format."""
    name: str = "custom"
    """Name of the workload (the file's)."""
    purpose: str = ""
    """One line: what it stands for."""
    notes: str = ""
    """How the figures were found, and what they leave undetermined; printed with every result."""
    windows: PositiveInt = 50
    """Length of a simulated run, in windows of the baseline's W groups."""
    profile: Tables
    """Profile keys that the workload sets for every profile: sizes, slots, placement."""
    profiles: Tables
    """Further keys per profile name, as `[profiles.one-step-off.async_training]`."""
    lengths: Lengths
    turns: Turns | None = None
    """Without it, a trajectory is one response."""
    decoding: Decoding
    memory: Memory | None = None
    """Without it, the cache has no limit."""
    rewarding: Rewarding = Rewarding()
    training: Training
    syncing: Syncing
    references: Annotated[tuple[Reference, ...], FromList] = ()
    """Measured rows."""


def workload_schema() -> dict[str, Any]:
    """The JSON Schema of a workload's file, in which the keys of `[profile]` and `[profiles.NAME]` are a profile's."""
    schema, of_profile = tidied(Workload.model_json_schema()), profile_schema()
    sections = {name: section for name, section in of_profile["properties"].items() if "$ref" in section}
    overrides = {"type": "object", "additionalProperties": False, "properties": sections}
    schema["properties"]["profile"] |= overrides
    schema["properties"]["profiles"] |= {"additionalProperties": overrides}
    definitions = {**of_profile[DEFINITIONS], **schema[DEFINITIONS]}
    return {"$schema": DIALECT, **schema, DEFINITIONS: definitions, "title": "asyncrl workload"}
