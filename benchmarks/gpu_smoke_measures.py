"""gpu_smoke.py's measurements of the trainer: its memory against `asyncrl plan`'s estimate, and its speed."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_smoke_kit import (
    GROUP_SIZE,
    PROMPT_TOKENS,
    Figures,
    Machine,
    Skipped,
    Step,
    Wrong,
    release,
    trainer_on,
)
from torch.profiler import ProfilerActivity

from asyncrl_cli.models.shape import shape_of
from asyncrl_cli.plan.cluster import ClusterResources, NodeResources
from asyncrl_cli.plan.compiler import compile_job
from asyncrl_cli.plan.job_plan import TRAINER
from asyncrl_cli.plan.memory import estimate_memory
from asyncrl_cli.profile.schema import PlacementSection, Profile, RunSection, TrainerSection
from asyncrl_cli.train import LOGITS_CHUNK_ELEMENTS

GIB = 2**30
CONTEXT_BYTES = 2 * GIB
"""Of the card's memory, for the context and fragmentation."""
PEAK_BF16_FLOPS = {
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "4090": 165e12,
}
"""Dense, from the vendor's data sheets, by a part of the card's name; the first that fits counts."""
MAX_UNDERESTIMATE, MAX_OVERESTIMATE = 1.05, 1.6
"""Measured / estimated, and estimated / measured."""


def check_memory(machine: Machine, figures: Figures) -> None:
    """The allocator's peak in a train step of two full microbatches, against the plan's estimate for a
    trainer rank."""
    sizes = ("0.1B", "0.5B", "1.7B") if machine.is_gpu else ("small", "medium", "large")
    wrong = []
    for size in sizes:
        tokens, model = (8192 if machine.is_gpu else 512), machine.model(size)
        trainer_section = TrainerSection(max_tokens_per_microbatch=tokens)
        profile = machine.profile(
            run=RunSection(train_steps=1),
            trainer=trainer_section,
            placement=PlacementSection(trainer_workers=1),
        )
        step = Step(
            model, groups=2, response_tokens=tokens // GROUP_SIZE - PROMPT_TOKENS + 1, is_ragged=False
        )
        estimate = _estimated(profile, model.directory)
        figures[f"{size}_estimated_gib"] = estimate / GIB
        if machine.is_gpu and estimate > torch.cuda.get_device_properties(0).total_memory - CONTEXT_BYTES:
            break  # nor do larger ones fit
        release(machine)
        with trainer_on(machine, model, profile) as trainer:
            for _ in range(2):
                trainer.train(**step.arguments(profile))
            measured = torch.cuda.max_memory_allocated()  # 0 without a GPU
        figures[f"{size}_measured_gib"] = measured / GIB
        if not estimate / MAX_OVERESTIMATE < measured < estimate * MAX_UNDERESTIMATE:
            wrong.append(f"{size}: {measured / GIB:.2f} GiB measured, {estimate / GIB:.2f} estimated")
    if not machine.is_gpu:
        raise Skipped(
            "the steps were made, but torch counts a GPU's memory only: benchmarks/memory.py measures a CPU's"
        )
    if wrong:
        raise Wrong("; ".join(wrong))


def _estimated(profile: Profile, directory: Path) -> int:
    """Bytes on the device at the peak of a train step."""
    nodes = (NodeResources(name="one", cpus=64, gpus=0 if profile.model.dtype == "float32" else 2),)
    estimate = estimate_memory(
        profile,
        compile_job(profile, ClusterResources(nodes=nodes, elastic_cpus=True)),
        shape_of(str(directory)),
    )
    phases: Counter[str] = Counter()
    for item in estimate.of(TRAINER, "device"):
        phases[item.phase] += item.num_bytes
    return phases["always"] + max(phases["step"], phases["update"])


def check_bench(machine: Machine, figures: Figures) -> None:
    """Tokens per second of a train step, by microbatch and by chunk of the logits; the share of the card's
    peak."""
    if machine.is_gpu:
        figures["matmul_tflops"] = _matmul_flops() / 1e12
    microbatches = (8192, 16_384, 32_768) if machine.is_gpu else (128, 512)
    chosen = LOGITS_CHUNK_ELEMENTS[machine.device]
    for tokens in microbatches:
        _bench(machine, figures, tokens, [chosen] if tokens != 16_384 else [2**25, 2**26, 2**27, 2**28])


def _bench(machine: Machine, figures: Figures, tokens: int, chunks: list[int]) -> None:
    profile = machine.profile(trainer=TrainerSection(max_tokens_per_microbatch=tokens))
    model, whole = machine.main, 32_768 if machine.is_gpu else 512
    step = Step(
        model, groups=4, response_tokens=whole // 4 // GROUP_SIZE - PROMPT_TOKENS + 1, is_ragged=False
    )
    flops = 6 * model.parameters * step.positions
    peak = _peak_flops()
    with trainer_on(machine, model, profile) as trainer:
        for chunk in chunks:
            LOGITS_CHUNK_ELEMENTS[machine.device] = chunk
            seconds = []
            for _ in range(3):
                began_s = time.perf_counter()
                trainer.train(**step.arguments(profile))
                machine.synchronize()
                seconds.append(time.perf_counter() - began_s)
            if chunk == chunks[-1]:
                _log_profile(machine, figures, tokens, lambda: trainer.train(**step.arguments(profile)))
            name = f"microbatch_{tokens}_chunk_2^{chunk.bit_length() - 1}"
            figures[f"{name}_tokens_per_s"] = step.positions / min(seconds)
            if peak:
                figures[f"{name}_of_peak"] = flops / min(seconds) / peak


def _log_profile(machine: Machine, figures: Figures, tokens: int, run: Callable[[], object]) -> None:
    """To the log: the operations of one step that take most of the time, on the GPU and on its host. To the
    figures: the share of the time in which the GPU computed at all, and the operations' shares of that."""
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * machine.is_gpu]
    with torch.profiler.profile(activities=activities) as profiled:
        began_s = time.perf_counter()
        run()
        machine.synchronize()
        taken_s = time.perf_counter() - began_s
    averages = profiled.key_averages()
    for key in ("self_device_time_total", "self_cpu_time_total")[not machine.is_gpu :]:
        table = averages.table(sort_by=key, row_limit=15, max_name_column_width=60)
        print(f"microbatch {tokens}: {key} of {taken_s:.3f} s", table, sep="\n", file=sys.stderr)
    ops = [
        op
        for op in averages
        if op.self_device_time_total and op.key.startswith(("aten::", "torch_attn::", "c10d::", "fsdp::"))
    ]
    busy_us = sum(op.self_device_time_total for op in ops)
    if busy_us:
        figures[f"microbatch_{tokens}_gpu_busy"] = busy_us / 1e6 / taken_s
        most = sorted(ops, key=lambda op: op.self_device_time_total, reverse=True)[:8]
        figures[f"microbatch_{tokens}_ops"] = {
            op.key: f"{op.self_device_time_total / busy_us:.0%}" for op in most
        }


def _peak_flops() -> float:
    """Of this card in bfloat16; 0 if it is not in the table."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((flops for part, flops in PEAK_BF16_FLOPS.items() if part in name), 0.0)


def _matmul_flops() -> float:
    """Of a large product in bfloat16: what the card reaches at best."""
    size, repeats = 8192, 20
    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        left @ right
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    for _ in range(repeats):
        left @ right
    torch.cuda.synchronize()
    return 2 * size**3 * repeats / (time.perf_counter() - began_s)
