"""The first run builds its model: what is said meanwhile, and what an interrupt leaves of it."""

from __future__ import annotations

import re
import signal
import time

import pytest

from tests.run.commands import finish, kill, start

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_the_model_is_built_keeps_nothing_and_is_no_error(tmp_path, number):
    process = start(tmp_path, "train", "--profile", "partial-rollout", "--name", "first", "--ui", "plain")
    assert process.stderr is not None
    said = [next(process.stderr)]
    while not said[-1].startswith("warm start"):
        said.append(next(process.stderr))
    assert re.fullmatch(r"warm start  1/300  0%  loss \d\.\d\d", said[-1].strip())
    kill(process, number)
    began_s = time.monotonic()
    code, out, err = finish(process)
    assert time.monotonic() - began_s < 10
    assert (code, out) == (130, "")
    assert err.splitlines()[-1] == "interrupted while the run was starting: no step was trained"
    assert "error:" not in err
    assert not list((tmp_path / "cache").rglob("*tiny*"))
    assert not list((tmp_path / "runs").glob("first*"))
