"""What vLLM is started with: our settings in its words, and the environment of its processes. Imports no vLLM."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any

from asyncrl_cli.engines.vllm.plugin import BACKEND, OWNER_VARIABLE
from asyncrl_cli.errors import ConfigError
from asyncrl_cli.models.shape import ShapeUnknown, shape_of
from asyncrl_cli.profile.schema import PROBE_TOKENS
from asyncrl_cli.profile.vllm_arguments import not_yours

PAGE_TOKENS = 128
"""At least what vLLM's pages hold: 16 on GPUs, 128 on CPUs."""
BATCHED_TOKENS = 2048
"""vLLM's own least choice of a pass's tokens. It refuses to start with more slots than that."""
BYTES_OF = {"float32": 4, "bfloat16": 2}
SPARE_CACHE_PAGES = 64
"""For cached prefixes beside what the slots need; and vLLM keeps one page to itself."""
BESIDE_A_TRAINER = 0.5
"""Share of a GPU that vLLM takes while it generates, where a trainer's weights and moments stay on it (colocate)."""
STREAM_INTERVAL_TOKENS = 8
"""vLLM hands a running response's tokens over in such lots. Each handing-over wakes a task in our event loop: token by token that
costs a tenth of the throughput of a small model at 64 sequences. What was not handed over yet is known all the same
(vllm_requests.completion_so_far)."""
IN_ENGINE_PROCESS = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""The one worker of an engine computes in the engine process, as on a GPU. On CPUs vLLM would start it a process of its own, to
set OpenMP's environment there: ours is set before any of them starts. By name: the short one, `uni`, it replaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """See the keys of `[rollout]`. None leaves the choice to us (`max_model_len`, `enforce_eager`) or to vLLM."""

    tensor_parallel_size: int = 1
    gpu_memory_utilization: float | None = None
    max_model_len: int | None = None
    enforce_eager: bool | None = None
    engine_args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSetup:
    """All that an engine is started with. `model_dir` is a local Hugging Face directory.

    `truncated_sampling`: requests use top-p or top-k, and their temperature is 1 or 0. Without it they use neither, at any
    temperature. (vLLM gives logprobs of the distribution either before temperature and truncation or after both, for a
    whole engine.)

    `sleeps`: a trainer takes turns with this engine on its GPUs (see `Engine.sleep`).

    `weight_backend`: the engine of vLLM that receives weights: ours, or vLLM's own `nccl` or `ipc`.
    """

    model_dir: Path | str
    slots: int
    max_prompt_tokens: int
    max_response_tokens: int
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 1
    seed: int = 0
    trust_remote_code: bool = False
    truncated_sampling: bool = False
    sleeps: bool = False
    weight_backend: str = BACKEND
    options: VllmOptions = field(default_factory=VllmOptions)

    @property
    def max_model_len(self) -> int:
        """vLLM scores a sequence as a prompt, with room for one token more: a probe fits, too."""
        return self.options.max_model_len or max(self.max_prompt_tokens + self.max_response_tokens, PROBE_TOKENS + 1)

    @property
    def is_eager(self) -> bool:
        """On a CPU without being told: compilation takes a minute at each start."""
        return self.options.enforce_eager if self.options.enforce_eager is not None else self.device == "cpu"


def set_environment(setup: VllmSetup) -> None:
    """For this process and those that vLLM starts; call it before vLLM is imported. What a user has set stays."""
    os.environ[OWNER_VARIABLE] = str(os.getpid())
    # A forked process would not call our plugin, which ends it with its parent. (In a Ray actor vLLM spawns anyway.)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    if setup.weight_backend == "ipc":
        # A CUDA handle passes vLLM's own sockets only pickled, and vLLM unpickles nothing without this.
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    defaults = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING", "OMP_NUM_THREADS": str(setup.threads)}
    if setup.device == "cpu":
        defaults["OMP_WAIT_POLICY"] = "passive"  # why: job/process.py
        # "auto" pins every engine of a machine to the same first cores.
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        if setup.is_eager:
            # vLLM compiles one small function (ranks of logprobs) even then, at the first request: 20 s on a CPU.
            defaults["TORCHDYNAMO_DISABLE"] = "1"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def engine_arguments(setup: VllmSetup) -> dict[str, Any]:
    """Names and values of `AsyncEngineArgs`; the user's `engine_args` come last, but for those that have a key of their own."""
    options = setup.options
    arguments: dict[str, Any] = {
        "model": str(setup.model_dir),
        "dtype": setup.dtype,
        "trust_remote_code": setup.trust_remote_code,
        "seed": setup.seed,
        "max_num_seqs": setup.slots,
        "max_model_len": setup.max_model_len,
        "tensor_parallel_size": options.tensor_parallel_size,
        "enforce_eager": setup.is_eager,
        "enable_prefix_caching": True,
        "stream_interval": STREAM_INTERVAL_TOKENS,
        "logprobs_mode": "raw_logprobs" if setup.truncated_sampling else "processed_logprobs",
    }
    if setup.device == "cpu":
        # Where a prompt (or a response begun: recompute-kv) is prefilled in parts, vLLM takes its seeded generator back a step,
        # which a CPU's generator cannot: the engine process would end with "CPU Generator does not use offset".
        arguments["enable_chunked_prefill"] = False
    if setup.slots > BATCHED_TOKENS:
        arguments["max_num_batched_tokens"] = max(setup.slots, setup.max_model_len)
    if options.tensor_parallel_size > 1:
        arguments["distributed_executor_backend"] = "mp"  # inside a Ray actor vLLM would start Ray actors of its own
    elif setup.device == "cpu":
        arguments["distributed_executor_backend"] = IN_ENGINE_PROCESS
    if setup.sleeps:
        arguments["enable_sleep_mode"] = True
    if options.gpu_memory_utilization is not None or setup.sleeps:
        arguments["gpu_memory_utilization"] = options.gpu_memory_utilization or BESIDE_A_TRAINER
    elif setup.device == "cpu" and (bytes_per_token := kv_bytes_per_token(setup)) is not None:
        pages = setup.slots * ceil(setup.max_model_len / PAGE_TOKENS) + SPARE_CACHE_PAGES
        arguments["kv_cache_memory_bytes"] = pages * PAGE_TOKENS * bytes_per_token
    return arguments | dict(options.engine_args)


def kv_bytes_per_token(setup: VllmSetup) -> int | None:
    """Keys and values of one token in all layers; None for a model whose sizes are not known."""
    try:
        values = shape_of(str(setup.model_dir)).kv_values_per_token
    except ShapeUnknown:
        return None
    return values * BYTES_OF[setup.dtype]


def check_engine_args(setup: VllmSetup, known: Collection[str] | None) -> None:
    """ConfigError for one of the user's arguments that vLLM would refuse, or that is not theirs to set.

    `known`: the names of its AsyncEngineArgs; None where nobody can tell them.
    """
    engine_args = setup.options.engine_args
    for name in engine_args:
        if (error := not_yours(name)) is not None:
            raise error
        if known is not None and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "names are those of vLLM's AsyncEngineArgs"
            if near and (ours := not_yours(near[0])) is not None:
                hint = ours.hint
            raise ConfigError(f"rollout.engine_args.{name}: vLLM has no such argument", hint=hint)
    if setup.device == "cpu" and engine_args.get("enable_chunked_prefill"):
        raise ConfigError(
            "rollout.engine_args.enable_chunked_prefill: vLLM on CPUs ends at a prompt that it computes in parts, if it has a seed",
            hint="leave it out",
        )
    _check_batched_tokens(setup)


def _check_batched_tokens(setup: VllmSetup) -> None:
    """A pass must have room for a token of every slot; and for a whole sequence where prompts are not computed in parts."""
    engine_args = setup.options.engine_args
    given = engine_args.get("max_num_batched_tokens")
    is_whole = not engine_args.get("enable_chunked_prefill", setup.device != "cpu")
    least = max(setup.slots, setup.max_model_len if is_whole else 0)
    if given is not None and not isinstance(given, int):
        raise ConfigError(f"rollout.engine_args.max_num_batched_tokens = {given!r} is no number of tokens", hint="leave it out")
    if given is not None and given < least:
        longest = f"the longest sequence ({setup.max_model_len} tokens), which is not computed in parts"
        why = longest if least > setup.slots else f"rollout.slots = {setup.slots}"
        raise ConfigError(
            f"rollout.engine_args.max_num_batched_tokens = {given} is less than {why}",
            hint=f"max_num_batched_tokens = {least} in rollout.engine_args, or leave it out",
        )
