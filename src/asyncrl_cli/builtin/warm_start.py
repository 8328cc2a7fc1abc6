"""Supervised warm start: a model learns from demonstrations to answer prompts, in a few hundred steps.

Matrices inside the layers are trained by Muon and the rest by AdamW. With Muon the model learns to copy
earlier text, which every worked answer needs, in about half the steps that AdamW alone takes. The loss is
plain next-token cross entropy on tokens with labels. The warm start is not part of the RL run: its optimizer
states are not kept.

Muon is momentum with an orthogonalised direction (Jordan et al., 2024). torch.optim.Muon orthogonalises in
bfloat16. CPUs without bfloat16 instructions emulate it, seven times slower and with results that differ from
other CPUs. Here it is done in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random

import torch
from transformers import PreTrainedModel

from asyncrl_cli.builtin.tiny import IGNORED, Recipe, Taught

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic polynomial that moves singular values towards 1 fastest."""
ITERATIONS = 5
SMALLEST_NORM = 1e-7


def warm_start(
    model: PreTrainedModel,
    lessons: Sequence[Taught],
    recipe: Recipe,
    *,
    seed: int,
    progress: Callable[[Sequence[float]], None] = lambda losses: None,
) -> list[float]:
    """Teach `model` in place; returns each step's loss (nats per learned token). Needs steps * batch_size
    lessons.

    `progress` is called after each step with the losses so far.
    """
    if len(lessons) < recipe.steps * recipe.batch_size:
        needed = f"{recipe.steps} steps of {recipe.batch_size} lessons"
        raise ValueError(f"{needed} need more than the {len(lessons)} given")
    matrices, others = list[torch.nn.Parameter](), list[torch.nn.Parameter]()
    for name, weight in model.named_parameters():
        (matrices if weight.ndim == 2 and ".layers." in name else others).append(weight)
    optimizers = (
        Muon(matrices, lr=recipe.matrix_lr),
        torch.optim.AdamW(others, lr=recipe.lr, betas=recipe.betas, weight_decay=0.0),
    )
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    peaks = [group["lr"] for group in groups]
    losses: list[float] = []
    model.train()
    # One thread: with matrices this small, a second one saves a tenth of the time on idle cores, but takes
    # ten times as long beside one busy process, because threads spin while they wait. How they wait is fixed
    # when torch is loaded.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for step, batch in enumerate(batches_of(lessons, recipe, Random(seed))):
            # Linear warm-up times a half cosine to zero: RL must not begin with the noise of large steps.
            warmup = min(1.0, (step + 1) / recipe.lr_warmup_steps)
            cosine = 0.5 * (1 + math.cos(math.pi * step / recipe.steps))
            for group, peak in zip(groups, peaks, strict=True):
                group["lr"] = peak * warmup * cosine
            loss = _loss(model, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.grad_clip)
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()
            losses.append(loss.item())
            progress(losses)
    finally:
        torch.set_num_threads(num_threads)
    model.eval()
    return losses


def batches_of(lessons: Sequence[Taught], recipe: Recipe, rng: Random) -> Iterator[list[Taught]]:
    """`recipe.steps` batches of lessons of similar length, in random order within a bucket."""
    size = recipe.batch_size
    wanted = lessons[: recipe.steps * size]
    for start in range(0, len(wanted), size * recipe.bucket_batches):
        end = start + size * recipe.bucket_batches
        bucket = sorted(wanted[start:end], key=lambda lesson: len(lesson[0]))
        batches = [bucket[first : first + size] for first in range(0, len(bucket), size)]
        rng.shuffle(batches)
        yield from batches


def _loss(model: PreTrainedModel, batch: Sequence[Taught]) -> torch.Tensor:
    """Mean cross entropy of the tokens with labels. Padding is on the right, so causal attention needs no
    mask."""
    width = max(len(tokens) for tokens, _ in batch)
    tokens_BT = torch.zeros(len(batch), width, dtype=torch.long)
    labels_BT = torch.full((len(batch), width), IGNORED)
    for row, (tokens, labels) in enumerate(batch):
        tokens_BT[row, : len(tokens)] = torch.tensor(tokens)
        labels_BT[row, : len(labels)] = torch.tensor(labels)
    logits_BTV = model(input_ids=tokens_BT, use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits_BTV[:, :-1].flatten(0, 1).float(), labels_BT[:, 1:].flatten(), ignore_index=IGNORED
    )


class Muon(torch.optim.Optimizer):  # type: ignore[misc]
    """Orthogonalised Nesterov momentum. A tall matrix's step is multiplied by sqrt(rows / columns). No weight
    decay."""

    def __init__(self, matrices: Iterable[torch.Tensor], *, lr: float, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self) -> None:
        for group in self.param_groups:
            for matrix in group["params"]:
                average = self.state[matrix].setdefault("momentum_buffer", torch.zeros_like(matrix))
                average.lerp_(matrix.grad, 1 - group["momentum"])
                direction = orthogonalised(matrix.grad.lerp(average, group["momentum"]))
                matrix.add_(direction, alpha=-group["lr"] * max(1.0, matrix.size(0) / matrix.size(1)) ** 0.5)


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """Approximates U V^T of the matrix's singular value decomposition: singular values end up between 0.7 and
    1.2."""
    a, b, c = NEWTON_SCHULZ
    x = matrix.T if matrix.size(0) > matrix.size(1) else matrix
    x = x / x.norm().clamp(min=SMALLEST_NORM)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.size(0) > matrix.size(1) else x
