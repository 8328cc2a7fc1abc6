"""What tests of several commands share."""

import pytest


@pytest.fixture
def quick_task(monkeypatch):
    """Items and their rehearsal take most of a plan's time. Tests of tasks ask for them with `--set`."""
    monkeypatch.setenv("ASYNCRL_TASK__REHEARSAL_ITEMS", "0")
    monkeypatch.setenv("ASYNCRL_TASK__SOURCE", "builtin:calculator")
