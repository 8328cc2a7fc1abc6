"""Deterministic runs on the virtual clock: what is trained depends on no latency, no worker and no death
(proof/logical.py)."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction

import pytest

from asyncrl_cli.base.errors import ConfigError, StallError
from asyncrl_cli.contracts.prompt_group import GroupResult, PartialResponse, VersionPlan
from asyncrl_cli.loop.ledger import Attempt
from asyncrl_cli.loop.logical_order import LogicalAdmission, LogicalSync
from asyncrl_cli.profile.check import check
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.simulate.simulated_worker import SimulatedWorker
from tests.loop.keywords import changed
from tests.loop.proof.drawing import MODES
from tests.loop.proof.faults import Fault, FaultKind, Faults
from tests.loop.proof.logical import (
    LogicalError,
    check_versions,
    differences,
    draw_logical,
    elsewhere,
    pair,
    run_logical,
)
from tests.loop.worlds import run_world, settings
from tests.marks import one_in

NUM_SEEDS = 40
NOTICING = (42, 1, 2, 4, *range(60))
"""The first ones are known to notice a planted mistake, the very first one what is rare."""


both_worlds = functools.cache(pair)
"""Each seed's runs once, whichever test asks; without a planted mistake."""


@pytest.mark.parametrize("seed", one_in(NUM_SEEDS, range(NUM_SEEDS)))
def test_two_worlds_train_the_same(seed):
    *_, wrong = both_worlds(seed)
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("seed", [4, 13, 17])
def test_two_worlds_reject_the_same_trajectories_that_crossed_an_update(seed):
    drawn = draw_logical(seed)
    here = run_logical(replace(drawn, settings=changed(drawn.settings, mixed_versions="reject")))
    there = run_logical(elsewhere(here.scenario, 1))
    assert (here.broken, there.broken, differences(here, there)) == (None, None, "")
    tokens = [one for groups in here.steps.values() for _, *group in groups for one, _ in group]
    assert {len(versions) for versions in tokens} == {1}
    assert min(here.counts["dropped"], there.counts["dropped"]) > 0


@pytest.mark.slow
def test_what_was_drawn_really_happens():
    counts, modes = Counter[str](), set[str]()
    for seed in range(NUM_SEEDS):
        outcome, *_ = both_worlds(seed)
        counts += outcome.counts + outcome.faults
        modes.add(outcome.scenario.mode)
        counts["spans"] += any(
            len(tokens) > 1 for groups in outcome.steps.values() for _, *all_ in groups for tokens, _ in all_
        )
    assert modes == {*MODES}
    assert {"dropped", "lost", "restarted", "resumed", "worker dies", "worker hangs", "spans"} <= set(+counts)


def without_order(admission):
    return [*admission.ledger.finished.values()]


MUTANTS = {
    "taken by arrival": (
        LogicalAdmission,
        "takeable",
        lambda self, num_groups, unscored=False: without_order(self)[: min(num_groups, self.takes_left)],
    ),
    "judged by arrival": (
        LogicalAdmission,
        "to_judge",
        lambda self: next((one for one in without_order(self) if one.position >= self.judged), None),
    ),
    "loaded too early": (LogicalAdmission, "load_blockers", lambda self, worker: []),
    "newest version first": (
        LogicalSync,
        "wanted",
        lambda self, worker: super(LogicalSync, self).wanted(worker),
    ),
    "parts as they came": (Attempt, "joined", lambda self: GroupResult.of(self.key, self.ended_parts())),
}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS)
def test_what_each_rule_keeps_out_is_noticed(mutant, monkeypatch):
    owner, name, planted = MUTANTS[mutant]
    monkeypatch.setattr(owner, name, planted)
    assert any(pair(seed)[2] for seed in NOTICING)


@pytest.mark.slow
def test_a_worker_that_samples_on_after_a_load_is_noticed(monkeypatch):
    """Without holds, partial responses are of the versions that happen to be loaded."""
    submit = SimulatedWorker.submit
    dropped = lambda self, request: submit(self, request.__class__(**fields_of(request)))  # noqa: E731
    monkeypatch.setattr(SimulatedWorker, "submit", dropped)
    assert any(pair(seed)[2] for seed in NOTICING)


def fields_of(request):
    names = ("key", "item", "indices", "seed", "partial", "partial_tokens")
    return {name: getattr(request, name) for name in names}


def stalled(monkeypatch, owner, name, planted):
    """The error of a run in which a rule never lets the run go on after version 1."""
    right = getattr(owner, name)
    after_1 = lambda self, *args: None if planted(self, *args) else right(self, *args)  # noqa: E731
    monkeypatch.setattr(owner, name, after_1)
    changes = dict(interrupt="recompute-kv", max_response_tokens=10)
    changes |= dict(window_steps=1, eta=Fraction(1), checkpoint_every_steps=2)
    chosen = settings("partial-rollout", deterministic=True, **changes)
    ran = run_world(chosen)
    assert isinstance(ran.error, StallError)
    assert ran.elapsed_s < 400
    return str(ran.error)


def test_a_checkpoint_that_waits_for_loads_which_never_come_ends_the_run_and_names_them(monkeypatch):
    error = stalled(monkeypatch, LogicalSync, "wanted", lambda self, worker: worker.version == 1)
    assert "trainer waits for every response to need version 2: rollout-0 is about to receive" in error


def test_a_load_that_waits_for_responses_which_never_end_names_their_groups(monkeypatch):
    error = stalled(monkeypatch, LogicalAdmission, "first_lost", lambda self: self.version >= 1)
    assert (
        "rollout-0 (load) waits for what needs version 1 to end: p8@0.0, p9@0.0, p10@0.0 and 1 more" in error
    )


def test_a_checkpoint_within_a_window_does_not_wait_for_a_worker_that_waits_for_the_trainers_resources():
    chosen = settings("colocate", deterministic=True, checkpoint_every_steps=1, max_restarts=1)
    first_step_s = run_world(chosen).recorder.steps[0].ended_s
    death = Fault(kind=FaultKind.WORKER_DIES, executor="rollout-1", at_s=first_step_s - 0.3)  # in training
    ran = run_world(chosen, faults=Faults([death]))
    assert ran.error is None
    assert ran.recorder.fields("restarted", "worker") == ["rollout-1"]
    assert [snapshot.step for snapshot, _ in ran.checkpoints.snapshots] == [*range(13)]


def test_a_version_plan_is_its_formula():
    plan = VersionPlan(first=3, last=5, stretch_tokens=4)
    assert [plan.at(position) for position in range(14)] == [3] * 4 + [4] * 4 + [5] * 6
    assert [plan.left(position) for position in (0, 3, 4, 8, 13)] == [4, 1, 4, None, None]
    kept = PartialResponse(((3, 4), (4, 2)))
    assert kept.cut(plan) == PartialResponse(((3, 4),))
    assert PartialResponse(((3, 2),)).cut(plan) is None
    assert PartialResponse(((3, 4), (4, 4))).cut(plan) == PartialResponse(((3, 4), (4, 4)))
    assert PartialResponse(((3, 2),), is_whole=True).cut(plan) == PartialResponse(((3, 2),), is_whole=True)


@pytest.mark.slow
def test_no_more_versions_are_kept_than_max_staleness_and_three(monkeypatch):
    offer, kept = LogicalSync.offer, Counter[int]()

    def counted(self, *given):
        offer(self, *given)
        kept[len(self._kept) - (self._max_lag - 1)] += 1

    monkeypatch.setattr(LogicalSync, "offer", counted)
    for seed in (4, 15):
        run_logical(draw_logical(seed))
    assert 1 < max(kept) <= 3


def test_the_independent_formula_notices_a_wrong_version():
    outcome = run_logical(draw_logical(0))
    assert outcome.broken is None
    (key, (tokens, reward), *others), *groups = outcome.steps[2]
    wrong = tuple((version + 5, count) for version, count in tokens)
    with pytest.raises(LogicalError, match="should be one of"):
        check_versions(outcome.scenario, {**outcome.steps, 2: ((key, (wrong, reward), *others), *groups)})


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ({"rollout": {"engine": "vllm"}}, "rollout.engine"),
        (
            {"async_training": {"staleness_threshold": Decimal(1), "on_stale": "drop"}},
            "async_training.on_stale",
        ),
        ({"rollout": {"min_workers": 1}}, "rollout.min_workers"),
        ({"weights": {"transport": "disk"}}, "weights.transport"),
        ({"task": {"agent": "mine:agent"}}, "task.agent"),
        ({"model": {"dtype": "bfloat16"}}, "model.dtype"),
    ],
)
def test_what_cannot_be_deterministic_is_refused_by_name(table, named):
    profile = Profile.model_validate({"run": {"train_steps": 1, "deterministic": True}, **table})
    with pytest.raises(ConfigError, match=rf"run\.deterministic = true with {named}.*"):
        check(profile)
