"""Defaults that follow from where a job runs: `model.dtype`, and how long a start, a train step and a
checkpoint may take. They are filled in once that is known, and before anything reads them.

The origin of such a value says what it follows from: `model.dtype = "bfloat16"  # default for cuda`.

    placement.start_timeout_s   600 s, and the time to read the model's files from a slow disk
    trainer.step_timeout_s      600 s, and the arithmetic of full-length responses on slow processors
    checkpoint.timeout_s        300 s, and the time to write weights and moments to a slow disk

The limits are there to end a hang, not to judge speed: a process that dies is noticed at once in any case.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from asyncrl_cli.models.shape import ModelShape
from asyncrl_cli.plan.job_plan import JobPlan
from asyncrl_cli.profile.arithmetic import Schedule, max_context_tokens
from asyncrl_cli.profile.check import check
from asyncrl_cli.profile.keys import values_of, with_values
from asyncrl_cli.profile.loaded import DEFAULT, Loaded, is_default
from asyncrl_cli.profile.schema import Profile

DTYPE = "model.dtype"
DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
"""On GPUs, float32 would mean no flash attention, no padding-free batches and twice the memory. Most CPUs
emulate bfloat16."""
START_KEY, STEP_KEY = "placement.start_timeout_s", "trainer.step_timeout_s"
CHECKPOINT_KEY = "checkpoint.timeout_s"
GB = 10**9
SLOW_DISK_BYTES_PER_S = 100 * 10**6
"""A basic network disk, or a hard disk: all nodes together write a checkpoint at this rate, and each reads
the model once."""
SLOW_FLOPS = {
    ("cuda", "bfloat16"): 40e12,
    ("cuda", "float32"): 8e12,
    ("cpu", "float32"): 10e9,
    ("cpu", "bfloat16"): 2e9,
}
"""Floating-point operations per second of a GPU or of a CPU's thread, by `model.dtype`: an eighth of an
A100's peak (two fifths is usual), a CPU core without wide vectors, and one that emulates bfloat16."""
FLOPS_PER_VALUE = 12
"""For a token and a parameter: forward and backward 6, activations computed again 2, the logprobs of the
window's first weights and of the reference 2 each."""
FILE_BYTES, STATE_BYTES = 4, 12
"""Per parameter: of the model's files, which may be float32; of a checkpoint's weights and two moments."""


def for_device(loaded: Loaded, device: str) -> Loaded:
    """With the default of `model.dtype` for the job's device. Raises ConfigError if other keys exclude it."""
    if loaded.origins.get(DTYPE) != DEFAULT:
        return loaded
    derived = _with_defaults(loaded, {DTYPE: (DTYPES[device], device)})
    check(derived.profile)
    return derived


def for_job(loaded: Loaded, plan: JobPlan, shape: ModelShape) -> Loaded:
    """With default time limits for this model and this number of ranks, also if an earlier attempt of the run
    had others."""
    profile, least = loaded.profile, values_of(Profile())
    num_models = 1 + profile.algorithm.has_critic  # a critic's size is about the policy's
    files, state = (each * shape.parameters * num_models for each in (FILE_BYTES, STATE_BYTES))
    context_tokens = max_context_tokens(profile)
    tokens = Schedule.of(profile).step_groups * profile.rollout.n * context_tokens
    # Attention is causal: half of all pairs.
    attention = shape.num_layers * shape.num_heads * shape.head_dim * context_tokens
    operations = FLOPS_PER_VALUE * num_models * tokens * (shape.parameters + attention)
    threads = profile.placement.cpus_per_worker if plan.device == "cpu" else 1
    rate = SLOW_FLOPS[plan.device, profile.model.dtype] * threads
    slowly = f"at {SLOW_DISK_BYTES_PER_S / 10**6:.0f} MB/s"
    on = f"on {plan.trainer_workers} x {rate / 1e12:g} TFLOP/s"
    work = {
        START_KEY: (files / SLOW_DISK_BYTES_PER_S, f"{files / GB:,.1f} GB of weights {slowly}"),
        STEP_KEY: (operations / plan.trainer_workers / rate, f"at most {tokens:,} tokens per step {on}"),
        CHECKPOINT_KEY: (
            state / SLOW_DISK_BYTES_PER_S,
            f"{state / GB:,.1f} GB of weights and moments {slowly}",
        ),
    }
    limits = {}
    for key, (work_s, why) in work.items():
        if is_default(loaded.origins.get(key, "")):
            limits[key] = float(10 * round((least[key] + work_s) / 10)), why  # in tens of seconds
    return _with_defaults(loaded, limits)


def _with_defaults(loaded: Loaded, defaults: Mapping[str, tuple[str | float, str]]) -> Loaded:
    """With values, and what they follow from, by dotted key."""
    profile = with_values(loaded.profile, {key: value for key, (value, _) in defaults.items()})
    origins = {key: f"{DEFAULT} for {why}" for key, (_, why) in defaults.items()}
    return replace(loaded, profile=profile, origins={**loaded.origins, **origins})
