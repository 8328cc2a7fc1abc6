"""What a loss writes per token, and integers that it is given: each at its own token, over segments, rows,
microbatches and optimizer steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.data.sample_fields import FIELDS, Field, Schema
from asyncrl_cli.train import policy_trainer
from asyncrl_cli.train.losses import LOSSES
from asyncrl_cli.train.losses.vanilla import vanilla
from tests.train.train_samples import make_step, save_tiny_model
from tests.trainers import rank_batch, trainer_parts

BIG = 2**30 + 1
"""No float32 is this integer."""


def writing(batch, algorithm):
    """Keeps what it can be held against: the sampler's logprobs, and the given integers without BIG."""
    batch.write("mu", batch.logp_mu_N)
    batch.write("given", batch.columns["numbers"] - BIG)
    return vanilla(batch, algorithm)


def careless(batch, algorithm):
    batch.write("mu", batch.logp_mu_N.sum())
    return vanilla(batch, algorithm)


def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: str, *fields: Field):
    monkeypatch.setitem(LOSSES, loss, f"{__name__}:{loss}")
    monkeypatch.setattr(policy_trainer, "schema_of", lambda profile: Schema([*FIELDS, *fields]))
    model = save_tiny_model(tmp_path / "model")
    parts = trainer_parts(model, loss_mode=loss, max_tokens_per_microbatch=200, total_optimizer_steps=2)
    return parts.made(f"file://{tmp_path}/meet")


MU = Field(name="mu", per="sampled", by="trainer")
NUMBERS = Field(name="numbers", per="token", by="environment", dtype="int64", fill=BIG, in_losses=True)
GIVEN = Field(name="given", per="sampled", by="trainer", dtype="int32")


@pytest.mark.slow
def test_each_token_has_its_own_value(tmp_path, monkeypatch):
    metas, payloads = make_step(1, num_groups=4)
    for payload in payloads[:2]:  # the others have the fill
        for one in payload.trajectories:
            one.per_token["numbers"] = BIG + np.arange(one.num_tokens)
    trainer = made(tmp_path, monkeypatch, "writing", MU, NUMBERS, GIVEN)
    try:
        step = rank_batch(metas, payloads, num_minibatches=2)
        report, fields = trainer.train(**step, dumped={0, 2}), trainer.loss_fields
        trainer.train(**step)
        assert trainer.loss_fields == {}, "nothing is dumped"
    finally:
        trainer.close()
    assert {group for group, _ in fields} == {0, 2}
    for (group, trajectory), arrays in fields.items():
        one = payloads[group].trajectories[trajectory]
        mask = one.per_token["mask"]
        np.testing.assert_array_equal(arrays["mu"], one.per_token["logprobs"][mask])
        places = np.flatnonzero(mask) if group == 0 else np.zeros(one.num_sampled)
        np.testing.assert_array_equal(arrays["given"], places)
        assert arrays["given"].dtype == np.int32
    everything = [one for payload in payloads for one in payload.trajectories]
    logprobs = np.concatenate([one.per_token["logprobs"][one.per_token["mask"]] for one in everything])
    assert report.metrics["fields/mu"].value == pytest.approx(logprobs.mean(dtype=np.float64), rel=1e-5)


@pytest.mark.parametrize(
    ("loss", "fields", "why"),
    [
        ("writing", (NUMBERS, GIVEN), 'writes the field "mu", which is not declared as the trainer\'s'),
        ("careless", (MU,), r'writes the field "mu" of shape \(\) for \d+ tokens'),
    ],
)
def test_what_is_not_declared_is_not_written(tmp_path, monkeypatch, loss, fields, why):
    trainer = made(tmp_path, monkeypatch, loss, *fields)
    try:
        with pytest.raises(ConfigError, match=why) as refused:
            trainer.train(**rank_batch(*make_step(1, num_groups=2)))
        assert refused.value.hint
    finally:
        trainer.close()
