"""`asyncrl resume --set`: what may change in a resumed run, and what is refused."""

from __future__ import annotations

import pytest

from asyncrl_cli.errors import ConfigError
from asyncrl_cli.profile.keys import keys, sections
from asyncrl_cli.profile.loaded import from_document, load, to_document
from asyncrl_cli.profile.resuming import FIXED, MAY_CHANGE, changed, may_change


def resumed(*sets):
    before = load("partial-rollout", ["rollout.n=4"])
    return changed(from_document(to_document(before.profile, before.origins)), sets)


def test_numbers_of_workers_and_where_they_run_may_change():
    loaded = resumed("rollout.workers=3", "placement.trainer_workers=2", "rollout.max_restarts=2", "trainer.meeting_timeout_s=600")
    assert (loaded.profile.rollout.workers, loaded.profile.placement.trainer_workers) == (3, 2)
    assert loaded.origins["rollout.workers"] == "--set (resume)"
    assert loaded.profile.rollout.n == 4, "the rest is the checkpoint's"
    assert loaded.origins["rollout.n"] == "--set"


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("rollout.n=8", "responses were sampled with it"),
        ("async_training.staleness_threshold=2", "deadlines follow from it"),
        ("trainer.lr=1e-5", "the steps before the checkpoint were trained with it"),
        ("task.source=reasoning-gym:chain_sum", "made and rewarded by it"),
        ("run.train_steps=9999", "learning rate's schedule"),
        ("placement.colocate=true", "placement.colocate"),
    ],
)
def test_what_the_checkpoint_was_made_with_may_not(key, reason):
    with pytest.raises(ConfigError, match=reason) as refused:
        resumed(key, "rollout.workers=3")
    assert key.partition("=")[0] in refused.value.message
    assert "rollout.workers" not in refused.value.message


def test_a_key_may_be_given_with_the_value_that_it_has():
    assert resumed("rollout.n=4").profile == resumed().profile


def test_conflicts_and_unknown_keys_are_refused_as_ever():
    with pytest.raises(ConfigError, match="no group ever fits"):
        resumed("rollout.slots=1", "rollout.workers=1")
    with pytest.raises(ConfigError, match="unknown key"):
        resumed("rollout.worker=1")


def test_the_tables_name_keys_and_sections_that_exist():
    assert {*MAY_CHANGE, *FIXED} <= {*keys(), *sections()}
    assert not [name for name in FIXED if may_change(name)]
