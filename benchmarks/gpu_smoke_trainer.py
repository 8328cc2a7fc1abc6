"""gpu_smoke.py's checks of the trainer: attention, its modes, and a resume."""

from __future__ import annotations

import statistics
import tempfile
from itertools import combinations, product
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from engine_kit import RandomModel
from gpu_smoke_kit import LEARNING_RATE, PROMPT_TOKENS, Figures, Machine, Step, Wrong, trainer_on

from asyncrl_cli.contracts.prompt_group import TrainReport
from asyncrl_cli.measure.values import shown
from asyncrl_cli.profile.schema import AlgorithmSection, LoraSection, ModelSection, Profile, TrainerSection
from asyncrl_cli.train.batch import Microbatch, scoring_microbatch
from asyncrl_cli.train.logprobs import ForwardPass
from asyncrl_cli.train.packed_rows import UNPADDED, Divide, Unpadded, in_padded_rows, padded
from asyncrl_cli.train.shared_prefixes import SharedPrefixes

if TYPE_CHECKING:
    from asyncrl_cli.train.policy_trainer import PolicyTrainer

LENGTHS = (7, 210, 33, 1, 400, 96)
MAX_LOGPROB_DIFF = {"float32": 1e-3, "bfloat16": 0.05}
"""Mean, between packed and padded rows."""
MAX_GRADIENT_DIFF = {"float32": 1e-3, "bfloat16": 0.05}
"""Relative, over all parameters."""
MAX_FLOAT32_ERROR = 1e-5
"""Relative, of shared prefixes, or else four times that of padded rows."""
TREES = ((0, 260), (200, 61), (200, 7), (200, 1), (230, 120), (40, 300), (200, 33), (190, 90), (190, 12))
TREES += ((0, 150), (1, 14), (12, 129), (140, 1), (140, 200))
"""Rows: how many first tokens each has from the row before, and how many of its own."""
SPEED_PROMPT, SPEED_RESPONSE, SPEED_MICROBATCH, SPEED_STEPS, WARM_UP_STEPS = 1000, 128, 16_384, 8, 3
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
    figures["gradient_diff"] = _gradient_diff(others, gradients)
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


def check_prefixes(machine: Machine, figures: Figures) -> None:
    """Rows that share prefixes, in trees of several levels: in float32, logprobs and gradients against those
    of float64 on the CPU, one row at a time; in the dtype of users, against padded rows. Then the speed of
    train steps with shared prefixes and without."""
    torch.set_float32_matmul_precision("highest")
    model = machine.model("medium" if machine.is_gpu else "small")
    rows = _rows_of_trees(model.vocab_size)
    expected, reference = _in_float64(model, rows)
    profile = machine.profile(
        model=ModelSection(dtype="float32"), trainer=TrainerSection(shared_prefixes=True)
    )
    errors = {}
    with trainer_on(machine, model, profile) as trainer:
        figures["kernel"] = _kernel_of(trainer)
        part = scoring_microbatch(rows, trainer.ranks.device, is_tree=True)
        for name, divide, attention in (("rows", padded, "sdpa"), ("trees", trainer.model.divide, UNPADDED)):
            found, gradients = _differentiated(trainer, part, divide, attention)
            logprob, gradient = _relative(found.cpu(), expected), _gradient_diff(gradients, reference)
            figures |= {f"{name}_logprob_error": logprob, f"{name}_gradient_error": gradient}
            errors[name] = max(logprob, gradient)
    if not errors["trees"] < max(MAX_FLOAT32_ERROR, 4 * errors["rows"]):
        raise Wrong("in float32, shared prefixes have other logprobs or gradients than float64 on the CPU")
    _compare_trees(machine, figures)
    if machine.is_gpu and figures["kernel"] != "in_blocks":
        raise Wrong("FlexAttention is not used on a GPU: see the log for the reason")


def _compare_trees(machine: Machine, figures: Figures) -> None:
    """The machine's main model and dtype."""
    trainer_keys = TrainerSection(shared_prefixes=True, max_tokens_per_microbatch=SPEED_MICROBATCH)
    profile = machine.profile(trainer=trainer_keys)
    with trainer_on(machine, machine.main, profile) as trainer:
        part = scoring_microbatch(
            _rows_of_trees(trainer.model.vocab_size), trainer.ranks.device, is_tree=True
        )
        divide, own = trainer.model.divide, trainer.model._forward
        expected, gradients = _differentiated(trainer, part, padded, "sdpa")
        found, others = _differentiated(trainer, part, divide, UNPADDED)
        trainer.model._forward = own
        figures["logprob_diff"] = (found - expected).abs().mean().item()
        figures["gradient_diff"] = _gradient_diff(others, gradients)
        for name, limit in (("logprob_diff", MAX_LOGPROB_DIFF), ("gradient_diff", MAX_GRADIENT_DIFF)):
            if not figures[name] < limit[profile.model.dtype]:
                raise Wrong(f"shared prefixes against padded rows: {name} {figures[name]:.2g}")
        del part, expected, gradients, found, others
        seconds: dict[str, list[float]] = {"rows": [], "trees": []}
        num_steps, warm_up = (SPEED_STEPS, WARM_UP_STEPS) if machine.is_gpu else (2, 1)
        for number, name in product(range(num_steps + warm_up), seconds):
            trainer.model.shares = name == "trees"
            step = Step(
                machine.main,
                response_tokens=SPEED_RESPONSE,
                number=number,
                prompt_tokens=SPEED_PROMPT if machine.is_gpu else PROMPT_TOKENS,
                has_one_prompt=True,
            )
            report = trainer.train(**step.arguments(profile))
            if number >= warm_up:
                seconds[name].append(report.train_s)
    for name, values in seconds.items():
        figures |= {f"{name}_step_s": statistics.median(values), f"{name}_slowest_s": max(values)}


def _kernel_of(trainer: PolicyTrainer) -> str:
    divide = trainer.model.divide
    return divide.kernel.__name__ if isinstance(divide, SharedPrefixes) else "none"


def _rows_of_trees(vocab_size: int) -> list[list[int]]:
    generator, rows = torch.Generator().manual_seed(2), list[list[int]]()
    for shared, own in TREES:
        drawn = torch.randint(vocab_size, (own + 1,), generator=generator).tolist()
        rows.append([*(rows[-1][:shared] if rows else ()), *drawn])
    return rows


def _in_float64(model: RandomModel, rows: list[list[int]]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """What `_differentiated` returns, by transformers alone."""
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(model.directory, dtype=torch.float64)
    logprobs = []
    for row in rows:
        tokens = torch.tensor([row])
        logits = whole(input_ids=tokens[:, :-1], use_cache=False).logits
        logprobs.append(logits.log_softmax(-1)[0].gather(-1, tokens[0, 1:, None]).squeeze(-1))
    logprobs_N = torch.cat(logprobs)
    (logprobs_N * (torch.arange(len(logprobs_N)) % 3 - 1.0)).sum().backward()
    return logprobs_N.detach(), {name: parameter.grad for name, parameter in whole.named_parameters()}


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def _gradient_diff(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Relative, over all parameters."""
    squares = [
        ((found[name].cpu() - one.cpu()).square().sum(), one.cpu().square().sum())
        for name, one in expected.items()
    ]
    off, norm = (torch.stack(parts).sum().sqrt() for parts in zip(*squares, strict=True))
    return (off / norm).item()


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
