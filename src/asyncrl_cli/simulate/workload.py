"""The keys of a workload: how long a model's work takes, in physical units, and how much work there is.

A workload does not contain any profile's speed: that is the result of a simulation, which runs the loop's
code on a virtual clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from asyncrl_cli.profile.fields import (
    Bytes,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Ratio,
    Section,
    Share,
)
from asyncrl_cli.profile.schema import PlacementSection
from asyncrl_cli.profile.toml_files import Table
from asyncrl_cli.profile.validation import DEFINITIONS, DIALECT, profile_schema, tidied

Tables = Annotated[Table, Field(default_factory=dict)]
FromList = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)


class Lengths(Section):
    """How long prompts and responses are. Responses never exceed the profile's
    `rollout.max_response_tokens`."""

    prompt_tokens: NonNegativeInt = 128
    """Tokens of every prompt."""
    distribution: Literal["lognormal", "list"] = "lognormal"
    """`lognormal` (median and sigma) or `list` (drawn from `response_tokens`, as for the lengths of a
    calibrated run)."""
    median_tokens: PositiveFloat | None = None
    """Median of the lognormal before it is truncated."""
    sigma: NonNegativeFloat | None = None
    """Standard deviation of the logarithm."""
    prompt_variance_ratio: Ratio = 0.0
    """Share of the logarithm's variance between prompts; the rest is between the trajectories of one
    prompt."""
    response_tokens: Annotated[tuple[PositiveInt, ...], FromList] = ()
    """The list: one entry per observed trajectory."""

    @model_validator(mode="after")
    def _has_what_it_draws_from(self) -> Lengths:
        if self.distribution == "list" and not self.response_tokens:
            raise ValueError('distribution = "list" needs response_tokens, such as [12, 40, 96]')
        if self.distribution == "lognormal" and None in (self.median_tokens, self.sigma):
            raise ValueError("a lognormal needs median_tokens and sigma, such as 1000.0 and 1.0")
        return self


class Drawn(Section):
    """A random quantity: lognormal, or drawn from a list."""

    median: PositiveFloat | None = None
    """Median of the lognormal."""
    sigma: NonNegativeFloat = 0.0
    """Standard deviation of its logarithm; 0 gives always the median."""
    values: Annotated[tuple[NonNegativeFloat, ...], FromList] = ()
    """The list, instead of a median."""

    @model_validator(mode="after")
    def _is_either(self) -> Drawn:
        if (self.median is None) == (not self.values):
            raise ValueError("needs either a median (and sigma) or values")
        return self


class Turns(Section):
    """Trajectories of several turns: after each turn but the last, the model waits for a tool and sees its
    result. `[lengths]` then applies to a turn. A tool that takes longer than the profile's
    `env.tool_timeout_s` fails its trajectory; `env.max_turns` and `env.max_context_tokens` end one."""

    number: Drawn
    """Turns of a trajectory, rounded, at least 1."""
    tool_s: Drawn
    """Seconds from the end of a turn to the beginning of the next."""
    result_tokens: Drawn
    """Tokens that a tool's result adds to the context, with what the chat template puts around it."""


class Decoding(Section):
    """Continuous batching in one rollout worker: a decode step takes `step_s + step_s_per_sequence *
    running`, the time to read the experts that the batch uses, and that to read the keys and values of all
    running sequences."""

    step_s: PositiveFloat
    """Seconds of a decode step that do not depend on its batch (reading the weights, launching kernels)."""
    step_s_per_sequence: NonNegativeFloat
    """Seconds that each running sequence adds to a decode step."""
    experts_s: NonNegativeFloat = 0.0
    """Seconds to read all experts of a mixture of experts."""
    expert_ratio: Share = 1.0
    """Share of the experts that one token uses: B sequences together use 1 - (1 - this) ** B of them."""
    step_s_per_context_token: NonNegativeFloat = 0.0
    """Seconds that each token in the context of a running sequence adds to a decode step (reading its keys
    and values)."""
    prefill_s_per_token: NonNegativeFloat = 0.0
    """Seconds per prompt token (and per token that recompute-kv prefills again)."""
    speed_spread: Ratio = 0.0
    """Workers differ: each worker's times are scaled by a factor uniform in 1 +- this."""
    tells_batch: bool = True
    """Whether `step_s` and `step_s_per_sequence` are known apart: not from batches of one size."""

    def batch_step_s(self, running: float) -> float:
        """A decode step of so many sequences, without reading their contexts."""
        experts_s = self.experts_s * float(1 - (1 - self.expert_ratio) ** running)
        return self.step_s + experts_s + self.step_s_per_sequence * running


class Memory(Section):
    """GPU memory of a rollout worker. Its KV cache gets the engine's share minus
    `syncing.parameter_bytes`."""

    gpu_memory_gib: PositiveFloat
    """Memory of one GPU, in GiB. A worker has `placement.gpus_per_rollout_worker` GPUs."""
    gpu_memory_utilization: Share = 0.9
    """Share of this memory that the engine may use, like `rollout.gpu_memory_utilization`."""
    kv_bytes_per_token: PositiveInt
    """Bytes of one token's keys and values, over all layers."""
    block_tokens: PositiveInt = 16
    """Tokens in a block of the cache."""


class Drift(Section):
    """How far the policy moves from a token's sampler, for `async_training.target_kl`: the token's KL is
    `fresh_kl + version_kl * age ** exponent`, its age in versions. An assumption, which does not affect any
    time without that key. The defaults are fitted to the runs of docs/learning.md, whose steps are large."""

    fresh_kl: NonNegativeFloat = 0.001
    """Nats per token of the version in training."""
    version_kl: NonNegativeFloat = 0.012
    """Nats per token that one version adds."""
    exponent: NonNegativeFloat = 1.7
    """How KL grows with age."""

    def kl(self, age: int) -> float:
        return self.fresh_kl + self.version_kl * float(age**self.exponent)


class Rewarding(Section):
    """The time from the last token of a trajectory to its reward."""

    latency_s: NonNegativeFloat = 0.0
    """Mean seconds."""
    latency_spread: Ratio = 0.0
    """Uniform in mean * (1 +- this)."""
    equal_ratio: Ratio = 0.0
    """Share of prompts whose trajectories all get the same reward, so that `algorithm.filter_groups` drops
    the group."""


class Training(Section):
    """An optimizer step takes `fixed_step_s + (step_s + tokens * imbalance * s_per_token) * (gpus /
    reference_gpus) ** -scaling_exponent`."""

    step_s: NonNegativeFloat = 0.0
    """Seconds of an optimizer step that do not depend on its tokens, on `reference_gpus`."""
    s_per_token: NonNegativeFloat
    """Seconds per trained token (prompt and response), on `reference_gpus`."""
    old_logprob_s_per_token: NonNegativeFloat = 0.0
    """Seconds per token of the old-logprob pass (`algorithm.old_logprobs = "recompute"`), on
    `reference_gpus`."""
    ref_s_per_token: NonNegativeFloat | None = None
    """Seconds per token of the reference's logprobs (`algorithm.use_kl_loss`, `use_kl_in_reward`), on
    `reference_gpus`; scales with the old-logprob pass's exponent. Default: a third of `s_per_token`, for
    forward without backward."""
    teacher_s_per_token: NonNegativeFloat | None = None
    """The same for the teachers' logprobs (`teacher.path`)."""
    reward_s_per_token: NonNegativeFloat | None = None
    """The same for the reward model's scores (`reward_model.path`) of whole sequences."""
    critic_s_per_token: NonNegativeFloat | None = None
    """The same for the critic's values (`algorithm.adv_estimator = "gae"`); its learning takes three times as
    long."""
    reference_gpus: PositiveInt = 1
    """Number of the trainer's devices for which the figures hold; on CPUs, ranks count as devices."""
    scaling_exponent: NonNegativeFloat = 1.0
    """1: twice as many devices halve the time; 0: more devices do not help."""
    old_logprob_scaling_exponent: NonNegativeFloat = 1.0
    """The same for the old-logprob pass."""
    gpus_per_rank: PositiveInt | None = None
    """Devices that compute a sequence together (tensor, pipeline, sequence and context parallel). With it,
    the sequences of a mini-batch are dealt to the data-parallel ranks whatever their lengths, and the rank
    that got most tokens counts: the imbalance. Without it, ranks share tokens evenly."""
    fixed_step_s: NonNegativeFloat = 0.0
    """Seconds of an optimizer step that more devices do not shorten: communication, and the longest sequence,
    which one device computes."""
    colocated_s: NonNegativeFloat = 0.0
    """Seconds per window that only a colocated trainer needs: its weights and the optimizer's moments come
    from the host's memory, and go back."""
    old_logprob_fixed_step_s: NonNegativeFloat = 0.0
    """The same for each mini-batch of the old-logprob pass."""
    step_overhead_s: NonNegativeFloat = 0.0
    """Seconds per train step that more devices do not shorten (taking the batch, advantages, moving
    payloads); the trainer's timing counts them as `other`."""


class Physics(Section):
    """A model on a GPU. `[decoding]` and the times per token of `[training]` follow from it: what must be
    read divided by bandwidth, what must be computed divided by FLOP/s."""

    parameters: Bytes
    """Parameters of the model, with all experts."""
    active_parameters: Bytes | None = None
    """Parameters that one token uses, if the model is a mixture of experts."""
    expert_ratio: Share = 1.0
    """Share of the experts that one token uses (8 of 128: 0.0625)."""
    bytes_per_parameter: PositiveFloat = 2.0
    """In the inference engine: 2 for bf16, 1 for FP8."""
    gpu_flop_per_s: Bytes
    """FLOP/s of one GPU by its data sheet, dense, in the precision of training."""
    gpu_bytes_per_s: Bytes
    """Memory bandwidth of one GPU by its data sheet."""
    colocated_gpus: PositiveInt = 1
    """GPUs of a rollout worker in colocated profiles. Those of asyncrl have one, published engines more."""
    bandwidth_efficiency: Share = 0.6
    """Share of the bandwidth that decoding reaches."""
    launch_s: NonNegativeFloat = 0.004
    """Seconds of a decode step beside reading and computing: kernel launches, scheduling, sampling, and the
    communication of tensor parallelism."""
    decode_mfu: Share = 0.5
    """Share of the FLOP/s that decoding and prefill reach."""
    train_mfu: Share = 0.35
    """Share of the FLOP/s that the update reaches on the tokens that its GPUs share."""
    logprob_mfu: Share | None = None
    """The same for old logprobs. Default: as the update."""
    train_flop_per_parameter: PositiveFloat = 8.0
    """FLOP of the update per active parameter and token: 6 for forward and backward, 2 more if activations
    are computed again; an adapter's backward through frozen weights saves 2."""

    def decoding(self, gpus: int, kv_bytes_per_token: float) -> dict[str, float]:
        """Times of `[decoding]` for a worker of `gpus` GPUs that share everything evenly."""
        active = self.active_parameters or self.parameters
        bandwidth = gpus * self.gpu_bytes_per_s * self.bandwidth_efficiency
        # parameters = dense + experts, active = dense + expert_ratio * experts
        experts = (self.parameters - active) / max(1 - self.expert_ratio, 1e-9)
        flop_s = 2 * active / (gpus * self.gpu_flop_per_s * self.decode_mfu)
        return {
            "step_s": self.launch_s + (self.parameters - experts) * self.bytes_per_parameter / bandwidth,
            "experts_s": experts * self.bytes_per_parameter / bandwidth,
            "expert_ratio": self.expert_ratio,
            "step_s_per_sequence": flop_s,
            "step_s_per_context_token": kv_bytes_per_token / bandwidth,
            "prefill_s_per_token": flop_s,
        }

    def training(self) -> dict[str, float]:
        """Times per token of `[training]`, on one GPU."""
        flop_s = (self.active_parameters or self.parameters) / self.gpu_flop_per_s
        return {
            "s_per_token": self.train_flop_per_parameter * flop_s / self.train_mfu,
            "old_logprob_s_per_token": 2 * flop_s / (self.logprob_mfu or self.train_mfu),
        }


class Unknown(Section):
    """A figure of the workload that was fitted, and what the fit leaves open."""

    key: str
    """The figure, such as `physics.train_mfu`. The file has its best value there."""
    prior: Annotated[tuple[PositiveFloat, PositiveFloat], FromList]
    """What was expected before any row was seen: a value, and the standard deviation of its logarithm."""
    factors: Annotated[tuple[PositiveFloat, ...], FromList] = ()
    """Values drawn from all that fit the rows within their noise, relative to the best one. Entry i of every
    unknown belongs to one draw."""


class Syncing(Section):
    """Gather, send and load of one version, from bytes and bandwidths."""

    parameter_bytes: Bytes
    """Bytes of the published weights."""
    gather_bytes_per_s: Bytes
    """Trainer copies the parameters into buckets (stalls training)."""
    gathers_rows: bool = False
    """Whether that was measured with `training.reference_gpus` ranks that each copied its own rows, so that
    more ranks are faster. Otherwise rank 0 gathered all."""
    send_bytes_per_s: Bytes
    """Buckets are sent to a worker's second buffer (stalls nobody)."""
    load_bytes_per_s: Bytes
    """A worker copies received weights into its model (stalls the worker)."""
    pause_s: NonNegativeFloat = 0.0
    """Fixed cost of interrupting and resuming a worker."""
    colocated_s: NonNegativeFloat = 0.0
    """Colocate: seconds per window to hand the devices over (sleep, wake, resharding), instead of gather,
    send and load."""
    wake_s: NonNegativeFloat = 0.0
    """Lending: how long a worker on the trainer's devices takes to wake, without send and load."""
    sleep_s: NonNegativeFloat = 0.0
    """Lending: how long it takes to stop and to give its devices back."""


class Links(Section):
    """The links and threads that a sync uses, instead of the bandwidths of `[syncing]`: then its times follow
    from transport, encoding, and the numbers of ranks, workers and nodes."""

    gpus_per_node: PositiveInt = 8
    """Trainer ranks and rollout workers have nodes of their own, as far as all GPUs are not on one."""
    device_bytes_per_s: Bytes
    """Between one GPU and its host."""
    node_bytes_per_s: Bytes
    """Objects over a node's network, in each direction."""
    group_bytes_per_s: Bytes
    """Collectives of GPUs between nodes: what one GPU sends."""
    copy_bytes_per_s: Bytes
    """A thread that takes fingerprints and copies: of a rank that sends, and of a node that receives."""
    compare_bytes_per_s: Bytes
    """A rank's thread that makes deltas."""
    apply_bytes_per_s: Bytes
    """A node's threads that apply deltas, all together."""
    changed_ratio: Ratio = 0.02
    """Bytes of a delta, relative to the whole version."""


class Reference(Section):
    """A measured row on which the workload was calibrated, or with which it is compared."""

    profile: str
    """Profile that was measured."""
    set: Tables
    """Profile keys that differ from the workload's own `[profile]`."""
    window_time_s: PositiveFloat
    """Measured seconds per window of W groups."""
    parts_s: Tables
    """Measured seconds per window of some parts. Keys are those of `timing/*_s` without prefix and unit, like
    wait_data, train."""
    staleness_mean: NonNegativeFloat | None = None
    """Measured mean staleness of trained tokens, in versions."""
    calibrated: bool = True
    """Whether the parameters were fitted to this row (false: it only checks a prediction)."""
    source: str = ""
    """Where the row comes from."""
    evidence: Literal["measured", "published"] = "measured"
    """`published` if somebody else measured it."""


class Workload(Section):
    """A model's work on some hardware. Made by `simulate.workload_files.load_workload`."""

    schema_version: Literal[1] = 1
    """Version of this format."""
    name: str = "custom"
    """Name of the workload (the file's)."""
    purpose: str = ""
    """One line that says what the workload stands for."""
    notes: str = ""
    """How the figures were found, and what remains unknown; printed with every result."""
    windows: PositiveInt = 50
    """Length of a simulated run, in windows of the baseline's W groups."""
    profile: Tables
    """Profile keys that the workload sets for every profile: sizes, slots, placement."""
    profiles: Tables
    """Further keys per profile name, such as `[profiles.one-step-off.async_training]`."""
    lengths: Lengths
    turns: Turns | None = None
    """Without it, a trajectory is one response."""
    cores: PositiveInt | None = None
    """CPU cores that all processes share, of which each takes `placement.cpus_per_worker`. While more are
    wanted at once than there are, all get equal shares. Without it, all have their own, or GPUs."""
    physics: Physics | None = None
    """The model and the GPU from which decoding and training are computed, instead of their own times."""
    decoding: Decoding
    memory: Memory | None = None
    """Without it, the cache has no limit."""
    rewarding: Rewarding = Rewarding()
    drift: Drift = Drift()
    training: Training
    syncing: Syncing
    links: Links | None = None
    """Without it, every sync takes as long as `[syncing]` says."""
    references: Annotated[tuple[Reference, ...], FromList] = ()
    """Measured rows."""
    noise_ratio: Ratio = 0.0
    """Standard deviation of the logarithm of a row's time between runs of the same setting."""
    unknowns: Annotated[tuple[Unknown, ...], FromList] = ()
    """What was fitted: from these come the intervals of predictions."""

    @model_validator(mode="before")
    @classmethod
    def _computed(cls, data: Any) -> Any:
        """Fills in what follows from `[physics]` and `[memory]`, for workers of one GPU."""
        if not isinstance(data, dict) or "physics" not in data:
            return data
        if not all(isinstance(data.get(name, {}), dict) for name in ("physics", "decoding", "training")):
            return data  # the section says that it is no table
        computed = {"decoding": {"step_s": 1.0, "step_s_per_sequence": 0.0}, "training": {"s_per_token": 0.0}}
        with suppress(ValidationError):  # the sections say what is wrong, and none of these times is used
            physics, memory = Physics.model_validate(data["physics"]), data.get("memory")
            kv_bytes = 0 if memory is None else Memory.model_validate(memory).kv_bytes_per_token
            computed = {"decoding": physics.decoding(1, kv_bytes), "training": physics.training()}
        for name, times in computed.items():
            if twice := sorted(times.keys() & data.get(name, {}).keys()):
                raise ValueError(f"{name}.{twice[0]} is computed from [physics]: leave one of the two out")
        return data | {name: times | data.get(name, {}) for name, times in computed.items()}

    def worker_gpus(self, placement: PlacementSection) -> int:
        """GPUs of a rollout worker."""
        if self.physics is not None and placement.colocate:
            return self.physics.colocated_gpus
        return placement.gpus_per_rollout_worker

    def on(self, placement: PlacementSection) -> Workload:
        """The workload for the rollout workers of this placement. Without `[physics]`, its times are those of
        its own workers."""
        if self.physics is None:
            return self
        kv_bytes = 0 if self.memory is None else self.memory.kv_bytes_per_token
        times = self.physics.decoding(self.worker_gpus(placement), kv_bytes)
        return self.model_copy(update={"decoding": self.decoding.model_copy(update=times)})

    def drawn(self, draw: int) -> Workload:
        """The workload with its unknowns as in one draw (0: their best values)."""
        if not draw:
            return self
        known = [one for one in self.unknowns if one.factors]
        return self.scaled({one.key: one.factors[(draw - 1) % len(one.factors)] for one in known})

    def scaled(self, factors: Mapping[str, float]) -> Workload:
        """The workload with some of its figures, by key, multiplied, and what follows from `[physics]`
        computed again. Shares stay at most 1."""
        changed = self.with_times(factors)
        if changed.physics is None or changed.physics is self.physics:
            return changed
        training = changed.training.model_copy(update=changed.physics.training())
        return changed.model_copy(update={"training": training})

    def with_times(self, factors: Mapping[str, float]) -> Workload:
        """The workload with some of its figures, by key, multiplied, also such as follow from `[physics]`:
        use it after `on`. Those that it does not have are left out."""
        sections: dict[str, Any] = {}
        for key, factor in factors.items():
            section, name = key.split(".")
            found = sections.get(section, getattr(self, section))
            if found is None or (value := getattr(found, name)) is None:
                continue
            is_share = name.endswith(("_mfu", "_efficiency", "_ratio"))
            value = min(value * factor, 1.0) if is_share else value * factor
            sections[section] = found.model_copy(update={name: value})
        return self.model_copy(update=sections)


def workload_schema() -> Table:
    """The JSON Schema of a workload file. The keys of `[profile]` and `[profiles.NAME]` are those of a
    profile."""
    schema, of_profile = tidied(Workload.model_json_schema()), profile_schema()
    # both follow from [physics] where a file has it
    schema["required"].remove("decoding")
    schema[DEFINITIONS]["Training"]["required"].remove("s_per_token")
    sections = {name: section for name, section in of_profile["properties"].items() if "$ref" in section}
    overrides = {"type": "object", "additionalProperties": False, "properties": sections}
    schema["properties"]["profile"] |= overrides
    schema["properties"]["profiles"] |= {"additionalProperties": overrides}
    definitions = {**of_profile[DEFINITIONS], **schema[DEFINITIONS]}
    return {"$schema": DIALECT, **schema, DEFINITIONS: definitions, "title": "asyncrl workload"}
