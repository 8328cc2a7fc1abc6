"""Runs the tests as CI does: `python .ci/suite.py`, in the root of the repository.

The suite runs once. What failed is run again alone, in one process, up to twice. A test that fails each time
fails CI. One that passes on a second try is listed under `flaky:` with the last lines of its first failure,
here and in build/flaky.txt. Only failed tests are run again: an error of collection, of pytest itself or an
interrupt ends CI. So does a skip that .ci/skips.toml does not name. On success the last line is pytest's own,
or one like it.

The failed tests are named to pytest rather than left to `--lf`. That forgets a test whose worker crashed,
because pytest-xdist runs it once more, and it runs the whole suite if it knows of no failure.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

SKIPS = Path(".ci/skips.toml")
BUILD = Path("build")
LAST_LINES = 15
MAX_FAILED = 20
"""With more failed tests than this a change is wrong; none is run again."""
LIMIT_S, RERUN_LIMIT_S = 45 * 60, 12 * 60


@dataclass(frozen=True, slots=True)
class Run:
    """How pytest ended (None: at its time limit) and whether every file could be collected. By test: the text
    of its first failure, the reason of its skip, or that it passed."""

    code: int | None
    collected: bool
    failed: dict[str, str]
    skipped: dict[str, str]
    passed: set[str]

    @property
    def as_expected(self) -> bool:
        """Whether the failed tests alone explain the exit code."""
        return self.collected and self.code == (
            pytest.ExitCode.TESTS_FAILED if self.failed else pytest.ExitCode.OK
        )


def run(name: str, limit_s: float, *arguments: str) -> Run:
    path = BUILD / f"{name}.jsonl"
    path.unlink(missing_ok=True)
    command = [sys.executable, Path(__file__).with_name("outcomes.py"), path, *arguments]
    try:
        code = subprocess.run(command, timeout=limit_s).returncode
    except subprocess.TimeoutExpired:
        code = None
    return read(code, path)


def read(code: int | None, path: Path) -> Run:
    failed, skipped, passed, collected = {}, {}, set(), set()
    broken = False
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        event = json.loads(line)
        match event["outcome"]:
            case "collected":
                collected.add(event["test"])
            case "not collected":
                broken = True
            case "failed":
                failed.setdefault(event["test"], event["text"])
            case "skipped":
                skipped[event["test"]] = event["text"]
            case "passed":
                passed.add(event["test"])
    failed |= dict.fromkeys(collected - failed.keys() - skipped.keys() - passed, "it was not run to its end")
    return Run(code=code, collected=not broken, failed=failed, skipped=skipped, passed=passed - failed.keys())


def rerun(failed: dict[str, str]) -> set[str]:
    """Those of the failed tests that pass in one of two more tries."""
    left = set(failed)
    for attempt in (1, 2):
        print(f"\nrun again, alone ({attempt} of 2): {len(left)} failed", flush=True)
        again = run(f"rerun-{attempt}", RERUN_LIMIT_S, "-n", "0", *sorted(left))
        left -= again.passed if again.as_expected else set()
        if not left:
            break
    return failed.keys() - left


def not_allowed(skipped: dict[str, str]) -> dict[str, str]:
    allowed = tomllib.loads(SKIPS.read_text(encoding="utf-8"))
    return {test: reason for test, reason in skipped.items() if test.partition("[")[0] not in allowed}


def listing(title: str, texts: dict[str, str]) -> str:
    lines = [title]
    for test, text in sorted(texts.items()):
        lines += [f"  {test}", *(f"      {line}" for line in text.splitlines()[-LAST_LINES:])]
    return "\n".join(lines) + "\n"


def closing_line(counts: dict[str, int], seconds: float) -> str:
    """As pytest ends: `=== 1 failed, 20 passed, 2 rerun in 3.00s ===`."""
    told = ", ".join(f"{number} {what}" for what, number in counts.items() if number)
    return f" {told} in {seconds:.2f}s ".center(80, "=")


def main() -> int:
    started = time.monotonic()
    BUILD.mkdir(exist_ok=True)
    (BUILD / "flaky.txt").unlink(missing_ok=True)
    first = run("suite", LIMIT_S, "-rs")
    if not first.as_expected or len(first.failed) > MAX_FAILED:
        print(
            f"\npytest ended with {first.code}; {len(first.failed)} tests failed or were not run: none is "
            "run again"
        )
        return first.code or 1

    recovered = rerun(first.failed) if first.failed else set()
    still = {test: text for test, text in first.failed.items() if test not in recovered}
    unexpected = not_allowed(first.skipped)
    if recovered:
        flaky = listing("flaky:", {test: first.failed[test] for test in recovered})
        (BUILD / "flaky.txt").write_text(flaky, encoding="utf-8")
        print(f"\n{flaky}")
    if unexpected:
        print(listing("\nskipped, although .ci/skips.toml does not name them:", unexpected))
    if still:
        print(listing("\nfailed each time:", still))
    if first.failed or unexpected:
        counts = Counter(
            failed=len(still),
            passed=len(first.passed | recovered),
            skipped=len(first.skipped),
            rerun=len(recovered),
        )
        print(closing_line(counts, time.monotonic() - started))
    return 1 if still or unexpected else 0


if __name__ == "__main__":
    sys.exit(main())
