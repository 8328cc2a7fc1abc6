"""Which file a report is, of runs and of a bench's directory. The plotting library is not needed: the pages
hold a word instead."""

import json
import re

import pytest

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.bench.output import write_results
from asyncrl_cli.report import write
from asyncrl_cli.report.write import write_report
from tests.bench.test_output import comparison
from tests.report.recorded_run import make_run


@pytest.fixture(autouse=True)
def _no_library(monkeypatch):
    monkeypatch.setattr(write, "plotly", lambda: "PLOTLY")


def made(names, tmp_path, out=None):
    return write_report([str(name) for name in names], out, tmp_path, lambda *told: None)[0]


def test_one_runs_report_lies_in_its_directory_and_is_renewed(tmp_path):
    make_run(tmp_path / "otter")
    assert made(["otter"], tmp_path) == made(["otter"], tmp_path) == tmp_path / "otter" / "report.html"


def test_a_bench_has_its_table_its_bars_and_the_first_run_of_each_profile(tmp_path):
    write_results(comparison(workload=""), tmp_path)
    for repeat in (0, 1):
        make_run(tmp_path / "runs" / f"partial-rollout-r{repeat}")
    html = made([tmp_path], tmp_path).read_text()
    cells = [re.sub(r"<[^>]*>", " ", row).split() for row in re.findall(r"<tr.*?</tr>", html)]
    assert ["speedup", "1.00x", "1.50x", "2.00x", "2.50x", "3.00x", "3.50x"] in cells
    assert ["%", "of", "the", "bound", *["80.0%"] * 6] in cells
    # 2 of 7 groups per second, and 512 groups in the ideal 100 s
    assert 'class="ideal" style="width:73.1%"><i style="width:39.1%">' in html
    runs = json.loads(re.search(r'id="report-data">(.*?)</script>', html)[1])["runs"]
    assert [run["name"] for run in runs] == ["partial-rollout-r0"]


def test_a_bench_is_not_put_beside_runs(tmp_path):
    write_results(comparison(), tmp_path)
    with pytest.raises(ConfigError, match="a bench, which has its own page"):
        made([tmp_path, make_run(tmp_path / "runs" / "otter")], tmp_path)
