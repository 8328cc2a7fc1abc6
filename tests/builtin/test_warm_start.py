"""The supervised warm start: what it teaches, in which order, and by what. Muon in float32, against
torch's own."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.builtin.tiny import IGNORED, Recipe, Taught, make_lessons, tiny_model
from asyncrl_cli.builtin.warm_start import Muon, batches_of, orthogonalised, warm_start
from asyncrl_cli.contracts.environment import RewardSpec
from asyncrl_cli.tasks.task import Task
from tests.products import counted_products


def taught(prompt: list[int], response: list[int]) -> Taught:
    return prompt + response, [IGNORED] * len(prompt) + response


def lessons_of(num: int, longest: int = 12) -> list[Taught]:
    rng = Random(0)
    return [taught([3] * rng.randint(1, longest), [rng.randint(4, 9), 1]) for _ in range(num)]


@pytest.mark.slow
def test_a_model_learns_to_answer_and_its_prompts_are_not_learned():
    model = tiny_model(10, seed=0)
    lessons = [taught([3, letter], [letter, letter, 1]) for letter in (4, 5, 6, 7)] * 40
    losses = warm_start(model, lessons, Recipe(steps=40, batch_size=4), seed=0)
    assert len(losses) == 40
    assert losses[-1] < 0.1 < losses[0]
    with torch.no_grad():
        logits = model(torch.tensor([[3, 6, 6, 6]])).logits[0]
    assert logits[1:].argmax(-1).tolist() == [6, 6, 1]


def test_every_lesson_is_used_once_and_batches_hold_lessons_of_like_length():
    lessons = [(tokens, [index]) for index, (tokens, _) in enumerate(lessons_of(64))]
    batches = list(batches_of(lessons, Recipe(steps=16, batch_size=4, bucket_batches=16), Random(1)))
    assert [len(batch) for batch in batches] == [4] * 16
    assert sorted(labels[0] for batch in batches for _, labels in batch) == list(range(64))
    spread = [
        max(map(len, texts)) - min(map(len, texts))
        for texts in ([tokens for tokens, _ in b] for b in batches)
    ]
    assert sum(spread) / len(spread) < 2


@pytest.mark.slow
def test_the_same_seed_gives_the_same_weights():
    models = [tiny_model(10, seed=0) for _ in range(2)]
    for model in models:
        warm_start(model, lessons_of(24), Recipe(steps=3, batch_size=8), seed=1)
    assert all(
        torch.equal(*both) for both in zip(models[0].parameters(), models[1].parameters(), strict=True)
    )


@pytest.mark.slow
def test_every_matrix_product_is_in_float32(tmp_path: Path):
    """Most CPUs have no instructions for bfloat16: 1.1 s per step instead of 0.15."""
    with counted_products(tmp_path) as products:
        warm_start(tiny_model(10, seed=0), lessons_of(24), Recipe(steps=3, batch_size=8), seed=1)
    assert {dtype for _, dtype in products} == {"float"}
    assert sum(products.values()) > 3 * 21 * 3  # three steps of forward, backward and Muon on 21 matrices


def test_one_thread_computes_and_the_caller_gets_its_number_back():
    seen, before = [], torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        report = lambda losses: seen.append((len(losses), torch.get_num_threads()))  # noqa: E731
        warm_start(
            tiny_model(10, seed=0), lessons_of(16), Recipe(steps=2, batch_size=8), seed=1, progress=report
        )
        assert seen == [(1, 1), (2, 1)]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_too_few_lessons_are_refused():
    with pytest.raises(ValueError, match="3 steps of 8 lessons need more than the 23 given"):
        warm_start(tiny_model(10, seed=0), lessons_of(23), Recipe(steps=3, batch_size=8), seed=1)


def test_the_given_share_of_lessons_has_a_slip(task):
    right = {item["prompt"]: task.demonstration(item, Random(0)) for item in task.train}
    for label_noise in (0.0, 0.5):
        lessons = make_lessons(task, num=2000, label_noise=label_noise, seed=0)
        num_wrong = sum(lesson.response != right[lesson.prompt] for lesson in lessons)
        # lists already in order cannot be stopped early, so some flawed demonstrations are right
        assert 0.8 * label_noise * 2000 <= num_wrong <= 1.1 * label_noise * 2000


def test_a_task_without_demonstrations_is_refused():
    bare = Task(name="jsonl:x", train=(), eval=(), reward=RewardSpec(kind="exact-match"), demonstration=None)
    with pytest.raises(ConfigError, match="learns from demonstrations, and jsonl:x provides none") as refused:
        make_lessons(bare, num=1, label_noise=0.0, seed=0)
    assert "builtin:untaught" in refused.value.hint


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
