"""pytest, with the outcome of each test in a file: `python .ci/outcomes.py FILE [pytest's arguments]`.

FILE gets one JSON object per line: `test`, its `outcome` (collected, passed, failed or skipped; of a file:
skipped or not collected) and `text`, the failure or the reason of the skip. Each line is written at once, so
a process that dies leaves what happened before.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest


class Outcomes:
    """The plugin. With pytest-xdist it runs only in the process that hears of every test."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8", buffering=1)

    def _write(self, test: str, outcome: str, text: str = "") -> None:
        self._file.write(json.dumps({"test": test, "outcome": outcome, "text": text}) + "\n")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            self._write(item.nodeid, "collected")

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        for nodeid in ids:
            self._write(nodeid, "collected")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self._report(report, "not collected" if report.failed else "skipped")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # A test passes in its call; its setup and teardown only fail or skip it.
        if not report.passed or report.when == "call":
            self._report(report, report.outcome)

    def _report(self, report: pytest.CollectReport | pytest.TestReport, outcome: str) -> None:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        self._write(report.nodeid, outcome, reason)


if __name__ == "__main__":
    sys.exit(pytest.main(sys.argv[2:], plugins=[Outcomes(Path(sys.argv[1]))]))
