"""What the probes say of a load, on forward passes of real models, by other attention than the trainer's."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from transformers import Qwen3ForCausalLM

from asyncrl_cli.builtin.tiny import tiny_model
from asyncrl_cli.weights.versions import judge, make_probes, mean_abs_diff

VOCABULARY = 64
PROBES = [list(tokens) for tokens in make_probes(4, VOCABULARY, seed=0)]
FORMER_LIMIT = 1e-3
"""Of the mean difference, with any dtype: all that there was."""

Logprobs = list[list[float]]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def scored(model: Qwen3ForCausalLM, attention: str, dtype: torch.dtype = torch.float32) -> Logprobs:
    """By an engine of that attention and dtype which holds these weights."""
    engine = copy.deepcopy(model).to(dtype).eval()
    engine.set_attn_implementation(attention)
    tokens_BT = torch.tensor(PROBES)
    with torch.no_grad():
        logits_BTV = engine(input_ids=tokens_BT, use_cache=False).logits[:, :-1].float()
    return torch.log_softmax(logits_BTV, dim=-1).gather(2, tokens_BT[:, 1:, None])[..., 0].tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    model: Qwen3ForCausalLM
    before: Qwen3ForCausalLM

    def partly(self, is_loaded: Callable[[int, str], bool]) -> Qwen3ForCausalLM:
        """A worker's model after a load that left out some tensors."""
        held = copy.deepcopy(self.before)
        pairs = zip(held.named_parameters(), self.model.parameters(), strict=True)
        for index, ((name, tensor), new) in enumerate(pairs):
            if is_loaded(index, name):
                tensor.data.copy_(new.data)
        return held


def versions(lr: float, count: int, seed: int = 0) -> Iterator[Version]:
    """Two steps of Adam apart, by a policy gradient of random advantages."""
    model = tiny_model(VOCABULARY, seed=seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, betas=(0.9, 0.99))
    generator = torch.Generator().manual_seed(seed)
    tokens_BT = torch.randint(0, VOCABULARY, (8, 32), generator=generator)
    for _ in range(count):
        before = copy.deepcopy(model)
        for _ in range(2):
            optimizer.zero_grad()
            logprobs_BTV = torch.log_softmax(model(input_ids=tokens_BT).logits[:, :-1], dim=-1)
            chosen_BT = logprobs_BTV.gather(2, tokens_BT[:, 1:, None])[..., 0]
            (-(torch.randn(8, 1, generator=generator) * chosen_BT).mean()).backward()
            optimizer.step()
        yield Version(model=copy.deepcopy(model), before=before)


PARTS: dict[str, Callable[[int, str], bool]] = {
    "nothing": lambda index, name: False,
    "every other tensor": lambda index, name: index % 2 == 0,
    "all but one of three layers": lambda index, name: "layers.1." not in name,
    "attention alone": lambda index, name: "attn" in name,
}


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_a_worker_that_loaded_only_part_of_a_small_update_is_found(part: str) -> None:
    """At a learning rate of 1e-6 the difference itself is far below what was allowed."""
    for version in versions(lr=1e-6, count=3):
        new, old = scored(version.model, "sdpa"), scored(version.before, "sdpa")
        worker = scored(version.partly(PARTS[part]), "eager")
        assert mean_abs_diff(worker, new) < FORMER_LIMIT
        judged = judge(worker, new, old)
        assert judged.verdict == "not loaded"
        assert part != "nothing" or judged.share == pytest.approx(0.0, abs=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("lr", [1e-7, 1e-6, 1e-5])
def test_a_worker_that_loaded_all_of_it_is_believed_whatever_its_attention(lr: float) -> None:
    for version in versions(lr, count=3):
        new, old = scored(version.model, "sdpa"), scored(version.before, "sdpa")
        judged = judge(scored(version.model, "eager"), new, old)
        assert (judged.verdict, judged.share) == ("loaded", pytest.approx(1.0, abs=0.02))


@pytest.mark.slow
@pytest.mark.parametrize(("lr", "expected"), [(1e-6, "unclear"), (1e-4, "loaded")])
def test_in_bfloat16_other_attention_is_no_alarm_and_what_cannot_be_told_is_said(
    lr: float, expected: str
) -> None:
    for version in (version for seed in range(2) for version in versions(lr, count=3, seed=seed)):
        new, old = (scored(model, "sdpa", torch.bfloat16) for model in (version.model, version.before))
        worker = scored(version.model, "eager", torch.bfloat16)
        assert FORMER_LIMIT < mean_abs_diff(worker, new) < 0.1
        assert judge(worker, new, old).verdict == expected
        nothing_loaded = judge(scored(version.before, "eager", torch.bfloat16), new, old)
        assert nothing_loaded.verdict == ("unclear" if expected == "unclear" else "not loaded")


@pytest.mark.slow
def test_noise_alone_is_neither_believed_nor_alarmed() -> None:
    """Both of the trainer's figures and the worker's are the same but for rounding."""
    rng = random.Random(0)
    for _ in range(2000):
        worker, new, old = (
            [[-2.0 + rng.gauss(0, 1e-3) for _ in range(31)] for _ in range(4)] for _ in range(3)
        )
        assert judge(worker, new, old).verdict == "unclear"


def test_a_token_that_one_side_sends_to_another_expert_is_no_alarm() -> None:
    """Logprobs of up to three tokens jump, by far more than all others change: in the worker, or in one of
    the two versions."""
    rng = random.Random(0)
    for _ in range(500):
        old = [[-2.0 + rng.gauss(0, 0.5) for _ in range(31)] for _ in range(4)]
        new = [[logprob + rng.gauss(0, 1e-3) for logprob in row] for row in old]
        worker = [[logprob + rng.gauss(0, 1e-4) for logprob in row] for row in new]
        assert judge(worker, new, old).verdict == "loaded"
        jumped = rng.choice([old, new, worker])
        for _ in range(rng.randint(1, 3)):
            jumped[rng.randrange(4)][rng.randrange(31)] += rng.choice([-0.1, 0.1])
        assert judge(worker, new, old).verdict != "not loaded"


def test_weights_that_did_not_change_cannot_be_told_apart() -> None:
    judged = judge([[-1.0, -2.0, -3.5]], [[-1.0, -2.0, -3.0]], [[-1.0, -2.0, -3.0]])
    assert (judged.verdict, judged.share) == ("unclear", None)


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_figures_that_are_not_finite_have_no_share_and_are_left_to_the_alarm_by_difference(
    bad: float,
) -> None:
    finite, spoilt = [[-1.0, -2.0, -3.0]], [[-1.1, bad, -3.3]]
    for worker, new, old in ((spoilt, finite, [[-1.2, -2.2, -3.1]]), (finite, [[-1.2, -2.2, -3.1]], spoilt)):
        judged = judge(worker, new, old)
        assert (judged.verdict, judged.share) == ("unclear", None)
    assert mean_abs_diff(spoilt, finite) == float("inf")
