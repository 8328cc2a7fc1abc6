"""`asyncrl resume --set`: what may change in a resumed run, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.profile.arithmetic import train_steps_of
from asyncrl_cli.profile.keys import keys, sections
from asyncrl_cli.profile.loaded import load
from asyncrl_cli.profile.resolved import FIXED, MAY_CHANGE, changed, from_document, to_document


def resumed(*sets):
    before = load("partial-rollout", ["rollout.n=4"])
    return changed(from_document(to_document(before.profile, before.origins)), sets)


def test_numbers_of_workers_and_where_they_run_may_change():
    limits = "rollout.max_restarts=2", "trainer.meeting_timeout_s=600"
    loaded = resumed("rollout.workers=3", "placement.trainer_workers=2", *limits)
    assert (loaded.profile.rollout.workers, loaded.profile.placement.trainer_workers) == (3, 2)
    assert loaded.origins["rollout.workers"] == "--set (resume)"
    assert loaded.profile.rollout.n == 4, "the rest is the checkpoint's"
    assert loaded.origins["rollout.n"] == "--set"


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("rollout.n=8", "responses were sampled with it"),
        ("async_training.staleness_threshold=2", "deadlines follow from it"),
        ("trainer.grad_clip=0.5", "the steps before the checkpoint were trained with it"),
        ("task.source=reasoning-gym:chain_sum", "made and rewarded by it"),
        ("run.seed=9", "order of the prompts"),
        ("placement.colocate=true", "placement.colocate"),
    ],
)
def test_what_the_checkpoint_was_made_with_may_not(key, reason):
    with pytest.raises(ConfigError, match=reason) as refused:
        resumed(key, "rollout.workers=3")
    assert key.partition("=")[0] in refused.value.message
    assert "rollout.workers" not in refused.value.message


def test_the_learning_rates_may_change_as_the_advice_for_skipped_steps_says():
    before = load("partial-rollout", ["algorithm.adv_estimator=gae", "rollout.n=1", "critic.lr=1e-3"])
    lower = changed(
        from_document(to_document(before.profile, before.origins)), ["trainer.lr=1e-5", "critic.lr=1e-4"]
    )
    assert (lower.profile.trainer.lr, lower.profile.critic.lr) == (1e-5, 1e-4)


@pytest.mark.parametrize("key", ["run.train_steps=9999", "run.total_rollout_steps=159984"])
def test_a_run_may_become_longer_whichever_key_gives_its_length(key):
    assert train_steps_of(resumed(key).profile) == 9999


def test_a_run_may_not_become_shorter():
    with pytest.raises(ConfigError, match="cannot become shorter: 2 train steps, after"):
        resumed("run.train_steps=2")


def test_a_longer_run_warns_that_a_falling_learning_rate_rises_again():
    before = load("partial-rollout", ["run.train_steps=10", "trainer.lr_schedule=cosine"])
    longer = changed(from_document(to_document(before.profile, before.origins)), ["run.train_steps=20"])
    assert [warning for warning in longer.warnings if "cosine now falls to zero at step 20" in warning]
    assert not [warning for warning in resumed("run.train_steps=9999").warnings if "lr_schedule" in warning]


def test_a_key_may_be_given_with_the_value_that_it_has():
    assert resumed("rollout.n=4").profile == resumed().profile


def test_conflicts_and_unknown_keys_are_refused_as_ever():
    with pytest.raises(ConfigError, match="no group ever fits"):
        resumed("rollout.slots=1", "rollout.workers=1")
    with pytest.raises(ConfigError, match="unknown key"):
        resumed("rollout.worker=1")


def test_the_page_on_resuming_lists_every_key_that_may_change():
    """As `section.key`, or in the list of a section, which begins with `section.`."""
    text = (Path(__file__).parents[2] / "docs" / "resume.md").read_text()
    for key in MAY_CHANGE:
        section, _, name = key.partition(".")
        of_section = re.search(rf"^- `{section}\.`: (.*?)(?=^-|^$)", text, re.MULTILINE | re.DOTALL)
        assert f"`{key}`" in text or f"`{key}.*`" in text or (of_section and f"`{name}`" in of_section[1]), (
            key
        )


def test_the_tables_name_keys_and_sections_that_exist():
    assert {*MAY_CHANGE, *FIXED} <= {*keys(), *sections()}
    assert MAY_CHANGE.isdisjoint(FIXED)
