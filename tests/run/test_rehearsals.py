"""The small twin of each template, run from elsewhere and without a network."""

import pytest

from asyncrl_cli.cli.app import run as asyncrl
from tests.run.commands import finish, lines, start

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("template", ["agent", "gsm8k-8gpu", "jsonl", "parquet-verl"])
def test_the_small_twin_of_a_template_trains_to_its_end(template, tmp_path):
    assert asyncrl(["init", template, str(tmp_path / "mine")]) == 0
    process = start(tmp_path, "train", "--profile", "mine/small.toml", "--name", "small", "--ui", "plain")
    code, _, err = finish(process)
    assert code == 0, err
    steps = lines(tmp_path / "runs" / "small" / "metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert all(0 <= step["reward/mean"] <= 1 for step in steps)
