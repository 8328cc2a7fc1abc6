"""gpu_smoke.py's checks of the trainer: attention, its modes, and a resume."""

from __future__ import annotations

import tempfile
from itertools import combinations, product
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from engine_kit import RandomModel
from gpu_smoke_kit import LEARNING_RATE, Figures, Machine, Step, Wrong, trainer_on

from asyncrl_cli.contracts.prompt_group import TrainReport
from asyncrl_cli.measure.values import shown
from asyncrl_cli.profile.schema import AlgorithmSection, LoraSection, ModelSection, Profile, TrainerSection
from asyncrl_cli.train.batch import Microbatch, scoring_microbatch
from asyncrl_cli.train.logprobs import ForwardPass
from asyncrl_cli.train.packed_rows import UNPADDED, Divide, Unpadded, in_padded_rows, padded

if TYPE_CHECKING:
    from asyncrl_cli.train.policy_trainer import PolicyTrainer

LENGTHS = (7, 210, 33, 1, 400, 96)
MAX_LOGPROB_DIFF = {"float32": 1e-3, "bfloat16": 0.05}
"""Mean, between packed and padded rows."""
MAX_GRADIENT_DIFF = {"float32": 1e-3, "bfloat16": 0.05}
"""Relative, over all parameters."""
MAX_METRIC_DIFF = {1: 2e-3, 2: 2e-2}
"""Relative, by optimizer step, between GPU and CPU in float32. AdamW's first step has the same size for all
gradients, also for those of nearly zero, whose sign is rounding."""
LOOKED_AT = ("train/loss", "train/grad_norm", "train/entropy")
SWITCHES = ("recompute", "lora", "critic", "offload")
Mode = frozenset[str]
"""The switches that are on."""


def check_attention(machine: Machine, figures: Figures) -> None:
    """The chosen attention and packing; packed rows have the logprobs and gradients of padded ones."""
    profile = machine.profile()
    with trainer_on(machine, machine.main, profile) as trainer:
        model = trainer.model
        figures |= {"attention": model.attention, "packed": model.is_packed}
        divide = model.divide if model.is_packed else Unpadded(in_padded_rows, trainer.ranks)
        generator = torch.Generator().manual_seed(1)
        rows = [
            torch.randint(model.vocab_size, (length + 1,), generator=generator).tolist() for length in LENGTHS
        ]
        part = scoring_microbatch(rows, trainer.ranks.device)
        expected, gradients = _differentiated(trainer, part, padded, "sdpa")
        found, others = _differentiated(trainer, part, divide, UNPADDED)
    figures["logprob_diff"] = (found - expected).abs().mean().item()
    squares = [((others[name] - own).square().sum(), own.square().sum()) for name, own in gradients.items()]
    off, norm = (torch.stack(parts).sum().sqrt() for parts in zip(*squares, strict=True))
    figures["gradient_diff"] = (off / norm).item()
    dtype = profile.model.dtype
    if (
        not figures["logprob_diff"] < MAX_LOGPROB_DIFF[dtype]
        or not figures["gradient_diff"] < MAX_GRADIENT_DIFF[dtype]
    ):
        raise Wrong("packed rows have other logprobs or gradients than padded rows")
    if machine.is_gpu and not (figures["packed"] and figures["attention"] == "sdpa"):
        raise Wrong("a model of bfloat16 on a GPU is not packed: see the log for the reason")


def _differentiated(
    trainer: PolicyTrainer, part: Microbatch, divide: Divide, attention: str
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logprobs of the part's tokens, and the gradients of a weighted sum of them."""
    model = trainer.model
    getattr(model.content, model.content.base_model_prefix).set_attn_implementation(attention)
    model._forward = ForwardPass(model.content, 1.0, divide)
    model.gathered.before_backward(is_last=True)
    logprobs_N = model.scored(part).logprobs_N
    signs_N = torch.arange(len(logprobs_N), device=logprobs_N.device) % 3 - 1.0
    (logprobs_N * signs_N).sum().backward()
    gradients = {}
    for name, parameter in model.parameters.items():
        gradients[name] = parameter.grad.to_local().float().clone()  # type: ignore[union-attr]
        parameter.grad = None
    return logprobs_N.detach(), gradients


def check_modes(machine: Machine, figures: Figures) -> None:
    """Loss, gradient norm and entropy of two train steps in each mode, in float32: those of a CPU without
    recomputation of activations and without offloading. All combinations on a GPU; on a CPU each switch
    alone, and all together."""
    on_cpu = Machine("cpu", machine.directory, threads=max(1, torch.get_num_threads() // 2))
    torch.set_float32_matmul_precision("highest")
    model = machine.model("medium" if machine.is_gpu else "small")
    counts = range(len(SWITCHES) + 1) if machine.is_gpu else (0, 1, len(SWITCHES))
    modes = [frozenset(mode) for count in counts for mode in combinations(SWITCHES, count)]
    without = {mode - {"offload"} for mode in modes}
    expected = {mode: _metrics(on_cpu, model, _profile(mode, "none")) for mode in without}
    wrong, largest = [], dict.fromkeys(MAX_METRIC_DIFF, 0.0)
    for mode, checkpointing in product(modes, ("none", "selective", "full")):
        found = _metrics(machine if machine.is_gpu else on_cpu, model, _profile(mode, checkpointing))
        for step, limit in MAX_METRIC_DIFF.items():
            diff = _largest_diff(found[step], expected[mode - {"offload"}][step])
            largest[step] = max(largest[step], diff)
            if not diff < limit:
                wrong.append(
                    f"{' '.join(sorted(mode)) or 'plain'} with {checkpointing}: {diff:.2g} in step {step}"
                )
    figures |= {"modes": 3 * len(modes)} | {
        f"largest_diff_step_{step}": diff for step, diff in largest.items()
    }
    if wrong:
        raise Wrong(f"relative difference from the CPU: {', '.join(wrong)}")


def _profile(mode: Mode, checkpointing: str) -> Profile:
    trainer = TrainerSection(
        lr=LEARNING_RATE,
        max_tokens_per_microbatch=1024,
        activation_checkpointing=checkpointing,
        offload_optimizer="offload" in mode,
    )
    algorithm = AlgorithmSection(
        adv_estimator="gae" if "critic" in mode else "grpo",
        old_logprobs="recompute" if "recompute" in mode else "rollout",
    )
    lora = LoraSection(rank=4 if "lora" in mode else 0)
    return Profile(model=ModelSection(dtype="float32"), trainer=trainer, algorithm=algorithm, lora=lora)


def _metrics(machine: Machine, model: RandomModel, profile: Profile) -> dict[int, dict[str, float]]:
    """What is looked at after the first and the second train step."""
    with trainer_on(machine, model, profile) as trainer:
        return {
            number: _looked_at(trainer.train(**Step(model, number=number).arguments(profile)))
            for number in MAX_METRIC_DIFF
        }


def _looked_at(report: TrainReport) -> dict[str, float]:
    metrics = shown(report.metrics)
    return {name: float(metrics[name]) for name in LOOKED_AT}


def _largest_diff(found: dict[str, float], expected: dict[str, float]) -> float:
    """Relative, to values of at least 0.01: a loss may be zero."""
    return max(abs(found[name] - value) / max(abs(value), 1e-2) for name, value in expected.items())


def check_resume(machine: Machine, figures: Figures) -> None:
    """A snapshot is written; another trainer that loads it has the same state bit for bit, and makes the same
    next step."""
    model, profile = machine.model("0.1B" if machine.is_gpu else "small"), machine.profile()
    later = Step(model, number=2).arguments(profile)
    with tempfile.TemporaryDirectory() as directory:
        with trainer_on(machine, model, profile) as trainer:
            trainer.train(**Step(model).arguments(profile))
            trainer.snapshot(1)
            trainer.write(1, Path(directory), with_published=False)
            state = {name: tensor.to("cpu", copy=True) for name, tensor in trainer.state_tensors().items()}
            expected = _looked_at(trainer.train(**later))
        with trainer_on(machine, model, profile) as trainer:
            trainer.load(Path(directory))
            differing = [
                name
                for name, tensor in trainer.state_tensors().items()
                if not torch.equal(tensor.cpu(), state[name])
            ]
            found = _looked_at(trainer.train(**later))
    diff = _largest_diff(found, expected)
    figures |= {"tensors": len(state), "next_step_diff": diff}
    if differing:
        raise Wrong(
            f"{len(differing)} of {len(state)} tensors are not the saved ones, {differing[0]} among them"
        )
    # flash attention's backward pass adds in any order
    if diff > (MAX_METRIC_DIFF[2] if machine.is_gpu else 0.0):
        raise Wrong(f"the step after the resume differs by {diff:.2g}")
