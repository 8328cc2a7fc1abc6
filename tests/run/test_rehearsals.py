"""The small twin of a template, run from elsewhere and without a network: that of an agent, which no plan can
try. All are planned, with a rehearsal of their rewards, in tests/cli/test_templates.py. (A file that is
trained to the end: test_verl_data.py.)"""

import pytest

from asyncrl_cli.cli.app import run as asyncrl
from tests.run.commands import finish, lines, start

pytestmark = pytest.mark.slow


def test_the_small_twin_of_a_template_trains_to_its_end(tmp_path):
    assert asyncrl(["init", "agent", str(tmp_path / "mine")]) == 0
    process = start(tmp_path, "train", "--profile", "mine/small.toml", "--name", "small", "--ui", "plain")
    code, _, err = finish(process)
    assert code == 0, err
    steps = lines(tmp_path / "runs" / "small" / "metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert all(0 <= step["reward/mean"] <= 1 for step in steps)
