"""The reference and prox with processes of their own: their columns make the same weights as the trainer's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from asyncrl_cli.errors import ExecutorFailed
from asyncrl_cli.train.scorers import LogprobScorer
from tests.train.train_samples import make_step, save_tiny_model
from tests.trainers import planned, trainer_parts

STEPS_IN_WINDOW = 2
MOST = 5e-6
"""Columns are made in other batches than those that are trained, and matrix products of other sizes add up in another order: about
1e-7 in a logprob, of which ten steps of AdamW, which divides by the gradient's size, make 1 to 4 millionths."""
KINDS = {
    "kl in the reward": ("ref", {"use_kl_in_reward": True, "kl_coef": 0.1}),
    "kl in the loss": ("ref", {"use_kl_loss": True, "kl_loss_coef": 0.1}),
    "prox": ("prox", {"old_logprobs": "recompute", "trigger_parameter_sync_step": STEPS_IN_WINDOW}),
    "prox of adapters": ("prox", {"old_logprobs": "recompute", "trigger_parameter_sync_step": STEPS_IN_WINDOW, "rank": 4}),
}


@pytest.fixture(scope="module")
def other_model_dir(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("other"), seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_columns_from_processes_of_their_own_make_the_same_weights(tiny_model_dir, other_model_dir, make_trainer, kind):
    """Ten steps in windows of two, whose groups are scored together."""
    task, keys = KINDS[kind]
    shared = {"ref_dir": other_model_dir if task == "ref" else "", "max_tokens_per_microbatch": 300, "total_optimizer_steps": 10}
    together = trainer_parts(tiny_model_dir, **shared, **keys)
    apart = trainer_parts(tiny_model_dir, **shared, **keys, tasks=(("train",), (task,), ("rollout",)))
    steps = [make_step(number, num_groups=4) for number in range(10)]
    weights = []
    for made in (together, apart):
        trainer, columns = make_trainer(made), []
        scorer = LogprobScorer(task, made.profile, made.place, trainer.ranks)
        assert (trainer.reference is None) is (made is apart or task == "prox")
        for number, (metas, payloads) in enumerate(steps):
            in_window = number % STEPS_IN_WINDOW
            if in_window == 0:
                if task == "prox":
                    publish(trainer, number, scorer)
                columns = scorer.score([*payloads, *steps[number + 1][1]], [])
            (plan,) = planned(metas, **{name: on for name, on in keys.items() if name.startswith("use")})
            scores = {task: dict(enumerate(columns[4 * in_window :][:4]))} if made is apart else None
            report = trainer.train(step_in_window=in_window, plan=plan, payloads=dict(enumerate(payloads)), scores=scores)
            assert task == "prox" or (task in report.column_s) is (made is together)
        weights.append({name: local.clone() for name, local in trainer.model.locals().items()})
    moved = max(float((weights[1][name] - one).abs().max()) for name, one in weights[0].items())
    assert 0 < moved <= MOST


def test_columns_of_the_batches_that_are_trained_make_the_same_bits(tiny_model_dir, other_model_dir, make_trainer):
    """So what differs above is the order of additions and nothing else."""
    metas, payloads = make_step(3, num_groups=2)
    keys = {"ref_dir": other_model_dir, "use_kl_loss": True, "kl_loss_coef": 0.1}
    weights = []
    for tasks in (None, (("train",), ("ref",), ("rollout",))):
        made = trainer_parts(tiny_model_dir, **keys, tasks=tasks)
        trainer = make_trainer(made)
        columns = LogprobScorer("ref", made.profile, made.place, trainer.ranks).score(payloads, [])
        scores = {"ref": dict(enumerate(columns))} if tasks else None
        (plan,) = planned(metas)
        trainer.train(step_in_window=0, plan=plan, payloads=dict(enumerate(payloads)), scores=scores)
        weights.append({name: local.clone() for name, local in trainer.model.locals().items()})
    assert all(torch.equal(one, weights[1][name]) for name, one in weights[0].items())


def publish(trainer, version, scorer):
    """The scorer gets the trainer's weights as a worker does."""
    trainer.gather(version)
    scorer.load(*trainer.published(version))


def test_weights_that_arrive_as_others_are_refused(tiny_model_dir, make_trainer):
    parts = trainer_parts(tiny_model_dir, old_logprobs="recompute", probe_sequences=2)
    trainer = make_trainer(parts)
    scorer = LogprobScorer("prox", parts.profile, parts.place, trainer.ranks)
    publish(trainer, 1, scorer)
    manifest, buckets = trainer.published(1)
    wrong = replace(manifest, probe_logprobs=tuple(tuple(x - 0.5 for x in row) for row in manifest.probe_logprobs))
    with pytest.raises(ExecutorFailed, match=r"version 1 gives other logprobs than in the trainer, by 0\.5"):
        scorer.load(wrong, buckets)
