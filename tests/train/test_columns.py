"""Columns of figures per sampled token: against plain forwards, handed in or computed; and from processes of
their own, where they make the same weights as the trainer's."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl_cli.base.errors import ExecutorFailed
from asyncrl_cli.data.sample_fields import BUILT_IN
from asyncrl_cli.data.trajectories import GroupPayload, trajectory_of
from asyncrl_cli.train.batch import PROX
from asyncrl_cli.train.policy_model import frozen_model
from tests.train.train_samples import make_segment, make_step, plain_logprobs
from tests.trainers import planned, trainer_parts, weights_of, with_columns

STEPS_IN_WINDOW = 2
MOST = {"by step": 0.0, "by window": 1e-5}
"""Columns of a step's groups are made in the batches that are trained, and make the same bits. Those of a
window's are not: matrix products of other sizes add up in another order, about 1e-7 in a logprob, of which
AdamW, which divides by the gradient's size, makes 1 to 4 millionths in six steps: in proportion to the
learning rate, which is why the test has its own. The bound is a twentieth of one step."""
KINDS = {
    "kl": ("ref", dict(use_kl_in_reward=True, kl_coef=0.1, use_kl_loss=True, kl_loss_coef=0.1)),
    "prox": ("prox", {"old_logprobs": "recompute", "trigger_parameter_sync_step": STEPS_IN_WINDOW}),
    "prox of adapters": (
        "prox",
        {"old_logprobs": "recompute", "trigger_parameter_sync_step": STEPS_IN_WINDOW, "rank": 4},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_columns_from_processes_of_their_own_make_the_same_weights(
    tiny_model_dir, other_model_dir, make_trainer, kind
):
    """Six steps in windows of two."""
    task, keys = KINDS[kind]
    shared = {
        "ref_dir": other_model_dir if task == "ref" else "",
        "max_tokens_per_microbatch": 300,
        "total_optimizer_steps": 6,
        "lr": 2e-4,
    }
    together = trainer_parts(tiny_model_dir, **shared, **keys)
    apart = trainer_parts(tiny_model_dir, **shared, **keys, tasks=(("train",), (task,), ("rollout",)))
    steps = [make_step(number, num_groups=4) for number in range(6)]
    weights = {}
    for scored in (None, *MOST):
        trainer, columns = make_trainer(apart if scored else together), []
        first = weights_of(trainer)
        scorer = frozen_model(task, apart.profile, apart.place, trainer.ranks)
        assert (trainer.reference is None) is (scored is not None or task == "prox")
        for number, (metas, payloads) in enumerate(steps):
            in_window = number % STEPS_IN_WINDOW
            if in_window == 0 and task == "prox":
                publish(trainer, number, scorer)
            if scored == "by step":
                columns = scorer.score(payloads, [])
            elif scored and in_window == 0:
                columns = scorer.score([*payloads, *steps[number + 1][1]], [])
            (plan,) = planned(metas, **{name: on for name, on in keys.items() if name.startswith("use")})
            given = {task: dict(enumerate(columns[-4:] if in_window else columns[:4]))} if scored else {}
            groups = with_columns(dict(enumerate(payloads)), **given)
            report = trainer.train(step_in_window=in_window, plan=plan, payloads=groups, columns=(*given,))
            assert task == "prox" or (task in report.column_s) is (scored is None)
        weights[scored] = weights_of(trainer)
        assert any(not torch.equal(one, first[name]) for name, one in weights[scored].items()), (
            "nothing was trained"
        )
    # prox gets adapters merged, which the trainer computes beside the weights
    merged = 1e-7 if "rank" in keys else 0.0
    for scored, most in MOST.items():
        moved = max(float((weights[scored][name] - one).abs().max()) for name, one in weights[None].items())
        assert moved <= max(most, merged), scored


def publish(trainer, version, scorer):
    """The scorer gets the trainer's weights as a worker does."""
    trainer.gather(version)
    scorer.load(*trainer.published(version))


def test_weights_that_arrive_as_others_are_refused(tiny_model_dir, make_trainer):
    parts = trainer_parts(tiny_model_dir, old_logprobs="recompute", probe_sequences=2)
    trainer = make_trainer(parts)
    scorer = frozen_model("prox", parts.profile, parts.place, trainer.ranks)
    publish(trainer, 1, scorer)
    manifest, buckets = trainer.published(1)
    wrong = replace(
        manifest, probe_logprobs=tuple(tuple(x - 0.5 for x in row) for row in manifest.probe_logprobs)
    )
    with pytest.raises(ExecutorFailed, match=r"logprobs of version 1 differ from the trainer's by 0\.5"):
        scorer.load(wrong, buckets)


def groups_of_several_segments() -> dict[int, GroupPayload]:
    rng = random.Random(3)
    groups = {}
    for index, lengths in ((4, [(3, 8), (30,)]), (7, [(5,), (2, 2, 19)])):
        trajectories = tuple(
            trajectory_of(
                tuple(make_segment(rng, 4, n, [0]) for n in tokens),
                BUILT_IN,
                reward=0.0,
                finish_reason="stop",
            )
            for tokens in lengths
        )
        groups[index] = GroupPayload(uid=str(index), epoch=0, attempt=0, trajectories=trajectories)
    return groups


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
            with torch.no_grad():
                parts = [plain_logprobs(model, segment) for segment in trajectory.segments()]
            assert ours.dtype == np.float32
            np.testing.assert_allclose(ours, np.concatenate(parts), atol=1e-5)


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
        columns = {}
        if is_handed_in:
            columns = {PROX: trainer.model.column(groups)}
            monkeypatch.setattr(
                trainer.model, "numbers_N", lambda microbatch: pytest.fail("it was computed again")
            )
        given = with_columns(groups, **columns)
        report = trainer.train(step_in_window=0, plan=plan, payloads=given, columns=(*columns,))
        assert ("train/old_logprob_tokens" in report.metrics) is not is_handed_in
        weights.append(weights_of(trainer))
    for name, computed in weights[0].items():
        torch.testing.assert_close(weights[1][name], computed, rtol=0, atol=2e-5)
