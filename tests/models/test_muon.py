"""Muon in float32: against torch's own, and no matrix product in a dtype that CPUs emulate."""

from __future__ import annotations

import pytest
import torch

from asyncrl_cli.builtin.warm_start import Muon, orthogonalised


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(16, 16), (8, 24), (24, 8)])
def test_singular_values_come_near_one_and_directions_stay(shape):
    matrix = random(*shape)
    u, _, vt = torch.linalg.svd(matrix, full_matrices=False)
    found = orthogonalised(matrix)
    assert found.dtype == torch.float32
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.5
    assert values.max() < 1.3
    inner = u.T @ found @ vt.T
    torch.testing.assert_close(inner, torch.diag(inner.diag()), atol=1e-3, rtol=0)


def test_nothing_to_orthogonalise_is_no_direction():
    assert torch.equal(orthogonalised(torch.zeros(4, 3)), torch.zeros(4, 3))


@pytest.mark.parametrize("shape", [(16, 16), (8, 24), (24, 8)])
def test_steps_are_those_of_torchs_muon_but_for_the_rounding_of_its_bfloat16(shape):
    ours, theirs = (torch.nn.Parameter(random(*shape)) for _ in range(2))
    optimizers = (Muon([ours], lr=0.1), torch.optim.Muon([theirs], lr=0.1, weight_decay=0.0))
    for step in range(3):
        for weight, optimizer in zip((ours, theirs), optimizers, strict=True):
            weight.grad = random(*shape, seed=step + 1)
            optimizer.step()
    moved = (theirs - random(*shape)).norm()
    assert (ours - theirs).norm() < 0.03 * moved
