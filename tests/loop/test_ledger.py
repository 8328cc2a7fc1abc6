"""The accounts of attempts."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl_cli.loop.ledger import Account, Ledger
from asyncrl_cli.loop.ports import AttemptKey


def key(number):
    return AttemptKey(f"p{number}", 0, 0)


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(list(Account))), max_size=60))
def test_admitted_is_always_the_sum_of_the_six_states(moves):
    ledger = Ledger()
    for number in range(10):
        ledger.admit(key(number))
    for number, to in moves:
        before = ledger.totals()
        try:
            ledger.move(key(number), to, "because")
        except (AssertionError, KeyError):
            assert ledger.totals() == before, "a refused transition changes nothing"
        totals = ledger.totals()
        assert totals.pop("admitted_total") == sum(totals.values()) == 10


def test_nothing_is_trained_twice_or_without_training():
    ledger = Ledger()
    ledger.admit(key(0))
    with pytest.raises(AssertionError, match="cannot go from running to trained"):
        ledger.move(key(0), Account.TRAINED)
    for account in (Account.FINISHED, Account.TRAINING, Account.TRAINED):
        ledger.move(key(0), account)
    with pytest.raises(KeyError):
        ledger.move(key(0), Account.TRAINED)


def test_the_state_survives_json():
    ledger = Ledger()
    for number in range(3):
        ledger.admit(key(number))
    ledger.move(key(0), Account.FINISHED)
    ledger.move(key(1), Account.DROPPED, "failed")
    copy = Ledger()
    copy.restore(json.loads(json.dumps(ledger.state())))
    assert copy.totals() == ledger.totals()
    copy.move(key(0), Account.TRAINING)
    assert copy.reasons == {"dropped: failed": 1}
