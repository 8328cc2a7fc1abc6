"""Muon in float32: momentum whose direction is made orthogonal, for matrices inside a network (Jordan et al., 2024).

torch.optim.Muon orthogonalises in bfloat16, which a CPU without bfloat16 instructions emulates: seven times slower on such a one,
and with another result than on its neighbour.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic that pulls singular values towards 1 fastest."""
ITERATIONS = 5
SMALLEST_NORM = 1e-7


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised; a tall matrix steps further by the square root of its aspect. No weight decay."""

    def __init__(self, matrices: Iterable[torch.Tensor], *, lr: float, momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for matrix in group["params"]:
                average = self.state[matrix].setdefault("momentum_buffer", torch.zeros_like(matrix))
                average.lerp_(matrix.grad, 1 - group["momentum"])
                direction = orthogonalised(matrix.grad.lerp(average, group["momentum"]))
                matrix.add_(direction, alpha=-group["lr"] * max(1.0, matrix.size(0) / matrix.size(1)) ** 0.5)


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """About U V^T of its singular value decomposition: all singular values come to lie between 0.7 and 1.2."""
    a, b, c = NEWTON_SCHULZ
    x = matrix.T if matrix.size(0) > matrix.size(1) else matrix
    x = x / x.norm().clamp(min=SMALLEST_NORM)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if matrix.size(0) > matrix.size(1) else x
