"""Columns of figures per sampled token: against plain forwards, handed in or computed."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl_cli.contracts.trajectories import GroupPayload, Trajectory
from asyncrl_cli.train.batch import PROX
from tests.train.train_samples import make_segment, make_step
from tests.trainers import planned, trainer_parts


def groups_of_several_segments() -> dict[int, GroupPayload]:
    rng = random.Random(3)
    groups = {}
    for index, lengths in ((4, [(3, 8), (30,)]), (7, [(5,), (2, 2, 19)])):
        trajectories = tuple(
            Trajectory(
                segments=tuple(make_segment(rng, 4, n, [0]) for n in tokens), reward=0.0, finish_reason="stop"
            )
            for tokens in lengths
        )
        groups[index] = GroupPayload(uid=str(index), epoch=0, attempt=0, trajectories=trajectories)
    return groups


def plain_logprobs(model, segment) -> np.ndarray:
    tokens = torch.tensor(segment.tokens_T, dtype=torch.int64)
    with torch.no_grad():
        logprobs = torch.log_softmax(model(tokens[None]).logits[0].double(), dim=-1)[:-1]
    return logprobs.gather(-1, tokens[1:, None])[:, 0].numpy()[segment.mask_T[1:]]


@pytest.mark.parametrize("max_tokens", [8192, 25])
def test_a_column_has_a_plain_forwards_logprobs_in_the_order_of_the_tokens(
    tiny_model_dir, make_trainer, max_tokens
):
    trainer = make_trainer(trainer_parts(tiny_model_dir, max_tokens_per_microbatch=max_tokens))
    groups = groups_of_several_segments()
    found = trainer.model.column(groups)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    assert list(found) == list(groups)
    for group, payload in groups.items():
        for ours, trajectory in zip(found[group], payload.trajectories, strict=True):
            expected = np.concatenate([plain_logprobs(model, segment) for segment in trajectory.segments])
            assert ours.dtype == np.float32
            np.testing.assert_allclose(ours, expected, atol=1e-5)


@pytest.mark.slow
def test_a_column_that_is_handed_in_trains_the_same_and_is_not_computed_again(
    tiny_model_dir, make_trainer, monkeypatch
):
    metas, payloads = make_step(1, num_groups=4)
    (plan,) = planned(metas, num_minibatches=2)
    groups, weights = dict(enumerate(payloads)), []
    for is_handed_in in (False, True):
        trainer = make_trainer(
            trainer_parts(tiny_model_dir, old_logprobs="recompute", lr=1e-3, max_tokens_per_microbatch=300)
        )
        columns = None
        if is_handed_in:
            columns = {PROX: trainer.model.column(groups)}
            monkeypatch.setattr(
                trainer.model, "numbers_N", lambda microbatch: pytest.fail("it was computed again")
            )
        report = trainer.train(step_in_window=0, plan=plan, payloads=groups, columns=columns)
        assert ("train/old_logprob_tokens" in report.metrics) is not is_handed_in
        weights.append({name: local.clone() for name, local in trainer.model.locals().items()})
    for name, computed in weights[0].items():
        torch.testing.assert_close(weights[1][name], computed, rtol=0, atol=2e-5)
