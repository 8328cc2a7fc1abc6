"""`--out` of reports and traces: an earlier one is renewed, anything else is left as it is."""

import pytest

from asyncrl_cli.base.errors import ConfigError, RefusedError
from asyncrl_cli.observe.recorded import Recorded
from asyncrl_cli.report import write
from asyncrl_cli.report.write import write_report, write_trace
from tests.report.recorded_run import make_run


def write_page(run, out):
    write_report([str(run)], out, run.parent, lambda *told: None)


def write_plain_trace(run, out):
    write_trace(Recorded(run), out)


def write_gzipped_trace(run, out):
    write_trace(Recorded(run), out.with_suffix(".gz"))


WRITERS = pytest.mark.parametrize("make", [write_page, write_plain_trace, write_gzipped_trace])


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(write, "plotly", lambda: "PLOTLY")
    return make_run(tmp_path / "otter")


@WRITERS
def test_an_earlier_one_is_renewed(make, run, tmp_path):
    make(run, tmp_path / "made")
    before = {path: path.stat().st_ino for path in tmp_path.glob("made*")}
    make(run, tmp_path / "made")
    after = {path: path.stat().st_ino for path in tmp_path.glob("made*")}
    assert len(before) == 1
    assert before.keys() == after.keys()
    assert before != after


@WRITERS
def test_what_was_made_by_somebody_else_is_not_overwritten(make, run, tmp_path):
    for name in ("made", "made.gz"):
        (tmp_path / name).write_text('{"traceEvents": []}')
    with pytest.raises(RefusedError, match="it is not overwritten"):
        make(run, tmp_path / "made")
    assert (tmp_path / "made").read_text() == (tmp_path / "made.gz").read_text() == '{"traceEvents": []}'


@WRITERS
def test_a_directory_and_a_place_that_does_not_exist_are_refused(make, run, tmp_path):
    for name in ("made", "made.gz"):
        (tmp_path / name).mkdir()
    with pytest.raises(RefusedError, match="it is a directory"):
        make(run, tmp_path / "made")
    with pytest.raises(ConfigError, match="is not a directory"):
        make(run, tmp_path / "missing" / "made")
