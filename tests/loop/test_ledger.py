"""The accounts of attempts."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.contracts.prompt_group import Prompt
from asyncrl_cli.loop.ledger import Attempt, Ledger, Stage


def admitted(ledger, num):
    attempts = [
        Attempt(prompt=Prompt(uid=f"p{number}", epoch=0, item={}), deadline=number % 3)
        for number in range(num)
    ]
    for attempt in attempts:
        ledger.admit(attempt)
    return attempts


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(list(Stage))), max_size=60))
def test_admitted_is_always_the_sum_of_the_six_stages(moves):
    ledger = Ledger()
    attempts = admitted(ledger, 10)
    for number, to in moves:
        before = ledger.totals(), ledger.deadlines.copy()
        try:
            ledger.move(attempts[number], to, "because")
        except AssertionError:
            assert (ledger.totals(), ledger.deadlines) == before, "a refused transition changes nothing"
        totals = ledger.totals()
        assert totals.pop("admitted_total") == sum(totals.values()) == 10
        untaken = [
            attempt.deadline for attempt in attempts if attempt.stage in (Stage.RUNNING, Stage.FINISHED)
        ]
        assert sorted(ledger.deadlines.elements()) == sorted(untaken)


def test_nothing_is_trained_twice_or_without_training():
    ledger = Ledger()
    (attempt,) = admitted(ledger, 1)
    with pytest.raises(AssertionError, match="cannot go from running to trained"):
        ledger.move(attempt, Stage.TRAINED)
    for stage in (Stage.FINISHED, Stage.TRAINING, Stage.TRAINED):
        ledger.move(attempt, stage)
    with pytest.raises(AssertionError, match="cannot go from trained to trained"):
        ledger.move(attempt, Stage.TRAINED)


def test_the_state_survives_json():
    ledger = Ledger()
    attempts = admitted(ledger, 3)
    ledger.move(attempts[0], Stage.FINISHED)
    ledger.move(attempts[1], Stage.DROPPED, "failed")
    copy = Ledger()
    copy.restore(json.loads(json.dumps(ledger.state())), [attempts[0], attempts[2]])
    assert copy.totals() == ledger.totals()
    copy.move(attempts[0], Stage.TRAINING)
    assert copy.reasons == {"dropped: failed": 1}
