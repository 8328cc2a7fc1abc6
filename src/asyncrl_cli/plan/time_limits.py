"""How long a start, a train step and a checkpoint may take by default, from bytes and tokens.

    placement.start_timeout_s   600 s, and the time to read the model's files from a slow disk
    trainer.step_timeout_s      600 s, and the arithmetic of a step with all responses at full length on slow processors
    checkpoint.timeout_s        300 s, and the time to write weights and moments to a slow disk

The limits are there to end a hang, not to judge speed: a process that dies is noticed at once, whatever they
are.
"""

from __future__ import annotations

from asyncrl_cli.models.shape import ModelShape
from asyncrl_cli.plan.job_plan import TRAINER, JobPlan
from asyncrl_cli.profile.arithmetic import Schedule, max_context_tokens
from asyncrl_cli.profile.schema import CheckpointSection, PlacementSection, Profile, TrainerSection

START_KEY, STEP_KEY, CHECKPOINT_KEY = (
    "placement.start_timeout_s",
    "trainer.step_timeout_s",
    "checkpoint.timeout_s",
)
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


def default_limits(profile: Profile, plan: JobPlan, shape: ModelShape) -> dict[str, tuple[float, str]]:
    """The seconds of each key, and what they follow from."""
    models = 1 + profile.algorithm.has_critic  # a critic's size is about the policy's
    files = FILE_BYTES * shape.parameters * models
    state = STATE_BYTES * shape.parameters * models
    tokens = Schedule.of(profile).step_groups * profile.rollout.n * max_context_tokens(profile)
    # causal: half of all pairs
    attention = shape.num_layers * shape.num_heads * shape.head_dim * max_context_tokens(profile)
    operations = FLOPS_PER_VALUE * models * tokens * (shape.parameters + attention)
    rate = SLOW_FLOPS[plan.device, profile.model.dtype] * (
        profile.placement.cpus_per_worker if plan.device == "cpu" else 1
    )
    ranks = plan.role(TRAINER).workers
    start, step, checkpoint = (
        PlacementSection().start_timeout_s,
        TrainerSection().step_timeout_s,
        CheckpointSection().timeout_s,
    )
    slowly = f"at {SLOW_DISK_BYTES_PER_S / 10**6:.0f} MB/s"
    each = f"on {ranks} x {rate / 1e12:g} TFLOP/s"
    return {
        START_KEY: (_with(start, files / SLOW_DISK_BYTES_PER_S), f"{files / GB:,.1f} GB of weights {slowly}"),
        STEP_KEY: (_with(step, operations / ranks / rate), f"at most {tokens:,} tokens per step {each}"),
        CHECKPOINT_KEY: (
            _with(checkpoint, state / SLOW_DISK_BYTES_PER_S),
            f"{state / GB:,.1f} GB of weights and moments {slowly}",
        ),
    }


def _with(least_s: float, work_s: float) -> float:
    """In tens of seconds."""
    return float(10 * round((least_s + work_s) / 10))
