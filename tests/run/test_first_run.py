"""The first run builds its model: what is said meanwhile, and what an interrupt leaves of it."""

import re
import signal

import pytest

from tests.run.commands import SOON_S, descendants, finish, kill, start, wait_until_gone

pytestmark = pytest.mark.slow


def test_an_end_while_the_model_is_built_keeps_nothing_and_is_no_error(tmp_path):
    words = ("--profile", "partial-rollout", "--name", "first", "--ui", "plain")
    process = start(tmp_path, "train", *words, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert process.stderr is not None
    said = [next(process.stderr)]
    while not said[-1].startswith("warm start"):
        said.append(next(process.stderr))
    assert re.fullmatch(r"warm start  1/300  0%  loss \d\.\d\d", said[-1].strip())
    family = descendants(process.pid)
    kill(process, signal.SIGINT)  # once: a second one might come before the end, and say something else
    code, out, err = finish(process, SOON_S)
    assert (code, out) == (130, "")
    assert not wait_until_gone(family)
    assert err.splitlines()[-1] == "interrupted while the run was starting: no step was trained"
    assert "error:" not in err
    assert not list((tmp_path / "cache").rglob("*tiny*"))
    assert not (tmp_path / "runs").exists()
