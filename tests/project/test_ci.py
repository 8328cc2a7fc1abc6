"""The CI's .ci/suite.py on made-up suites: what it runs again, what it fails, and what it prints last."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "suite.py"
ONCE = """
def fails_before_try(number, name, then=lambda: None):
    tries = Path(f"{name}.tries")
    tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
    if len(tries.read_text()) < number:
        then()
        assert 1 == 2, "the made-up failure"
"""
PLUGINS = "-p xdist.plugin -p pytest_timeout -p no:cacheprovider"
ENVIRONMENT = {"PATH": os.environ["PATH"], "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
pytestmark = pytest.mark.slow


def run_of(root: Path, options: str = "-n 0", skips: str = "", **files: str) -> tuple[int, str]:
    """Exit code and output of CI on these test files."""
    (root / ".ci").mkdir(exist_ok=True)
    (root / ".ci" / "skips.toml").write_text(skips)
    (root / "pytest.ini").write_text(f"[pytest]\naddopts = {PLUGINS} {options}\n")
    for name, text in files.items():
        (root / f"test_{name}.py").write_text(
            f"import os\nimport pytest\nfrom pathlib import Path\n{ONCE}\n{text}\n"
        )
    done = subprocess.run(
        [sys.executable, SCRIPT], cwd=root, env=ENVIRONMENT, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout + done.stderr


def last_line(output: str) -> str:
    return output.splitlines()[-1].strip("= ")


def test_a_suite_that_passes_runs_once_and_ends_with_pytests_own_line(tmp_path):
    code, output = run_of(tmp_path, good="def test_a(): pass\ndef test_b(): pass")
    assert code == 0
    assert output.count("collected 2 items") == 1
    assert re.fullmatch(r"2 passed in \d.*s", last_line(output))
    assert "flaky" not in output
    assert not (tmp_path / "build" / "flaky.txt").exists()


def test_tests_that_pass_on_a_further_try_are_listed_with_their_first_failures(tmp_path):
    tests = "def test_once(): fails_before_try(2, 'once')\ndef test_twice(): fails_before_try(3, 'twice')"
    code, output = run_of(tmp_path, flaky=tests, good="def test_a(): pass")
    assert code == 0
    assert re.fullmatch(r"3 passed, 2 rerun in \d.*s", last_line(output))
    listed = (tmp_path / "build" / "flaky.txt").read_text()
    assert listed in output
    assert listed.startswith("flaky:\n  test_flaky.py::test_once\n")
    assert "  test_flaky.py::test_twice\n" in listed
    assert "AssertionError: the made-up failure" in listed
    assert (tmp_path / "once.tries").read_text() == "xx", "what has passed is not run again"
    assert output.count("test_good.py") == 1


def test_a_test_fails_ci_if_it_fails_three_times_in_its_teardown_too_or_is_skipped_on_a_further_try(tmp_path):
    tests = """
def test_always(): fails_before_try(4, 'always')
@pytest.fixture
def left():
    yield
    assert False
def test_teardown(left): pass
def test_skipped():
    fails_before_try(2, 'skipped')
    pytest.skip('not now')
def test_once(): fails_before_try(2, 'once')
"""
    code, output = run_of(tmp_path, bad=tests)
    assert code == 1
    assert (tmp_path / "always.tries").read_text() == "xxx"
    assert re.fullmatch(r"3 failed, 1 passed, 1 rerun in \d.*s", last_line(output))
    failed = output.partition("failed each time:")[2]
    assert re.findall(r"^  (test_\S+)", failed, re.MULTILINE) == [
        f"test_bad.py::test_{name}" for name in ("always", "skipped", "teardown")
    ]


def test_a_worker_that_crashes_once_costs_one_rerun_and_loses_no_test(tmp_path):
    test = """
def test_a(): pass
def test_it(): fails_before_try(2, 'it', lambda: os._exit(1))
def test_z(): pass
"""
    code, output = run_of(tmp_path, "-n 2 --dist loadfile", flaky=test, good="def test_a(): pass")
    assert code == 0
    assert re.fullmatch(r"4 passed, 1 rerun in \d.*s", last_line(output))
    assert "crashed while running 'test_flaky.py::test_it'" in (tmp_path / "build" / "flaky.txt").read_text()


def test_a_worker_that_crashes_each_time_fails_ci(tmp_path):
    test = "def test_a(): pass\ndef test_it(): os._exit(0)\ndef test_z(): pass"
    code, _ = run_of(tmp_path, "-n 1 --max-worker-restart=1", bad=test, good="def test_a(): pass")
    assert code != 0


def test_pytest_that_dies_with_exit_code_0_fails_ci(tmp_path):
    code, output = run_of(tmp_path, bad="def test_it(): os._exit(0)\ndef test_z(): pass")
    assert code == 1
    assert "run again, alone" not in output


def test_a_timeout_is_run_again_like_any_failure(tmp_path):
    test = "def test_it(): fails_before_try(2, 'it', lambda: __import__('time').sleep(60))"
    code, output = run_of(tmp_path, "-n 1 --timeout=1", slow=test)
    assert code == 0
    assert re.fullmatch(r"1 passed, 1 rerun in \d.*s", last_line(output))


@pytest.mark.parametrize(
    ("options", "name", "text"),
    [
        ("-n 1", "test_bad.py", "import a_module_that_nobody_has"),
        ("-n 0", "conftest.py", "def pytest_runtest_setup(item): raise KeyboardInterrupt"),
        (
            "-n 1",
            "conftest.py",
            "def pytest_runtest_protocol(item, nextitem): raise RuntimeError('internal')",
        ),
        ("-n 0", "conftest.py", "def pytest_sessionfinish(session): session.exitstatus = 1"),
    ],
    ids=["collection by a worker", "interrupt", "internal error of a worker", "failed session"],
)
def test_what_is_not_a_failed_test_fails_ci_at_once(tmp_path, options, name, text):
    (tmp_path / name).write_text(text)
    code, output = run_of(tmp_path, options, good="def test_a(): pass")
    assert code not in (0, None)
    assert "run again, alone" not in output


def test_a_suite_without_tests_fails_ci(tmp_path):
    assert run_of(tmp_path)[0] == pytest.ExitCode.NO_TESTS_COLLECTED


def test_more_failures_than_chance_makes_are_not_run_again(tmp_path):
    code, output = run_of(
        tmp_path, bad="@pytest.mark.parametrize('n', range(21))\ndef test_it(n): assert False"
    )
    assert code == 1
    assert "run again, alone" not in output


SKIPPED = """
@pytest.mark.parametrize('n', [1, 2])
@pytest.mark.skipif(True, reason='no GPU here')
def test_it(n): pass
"""


def test_a_skip_that_is_not_named_fails_ci_and_says_why_it_was_skipped(tmp_path):
    code, output = run_of(tmp_path, some=SKIPPED, good="def test_a(): pass")
    assert code == 1
    told = output.partition("skipped, although .ci/skips.toml does not name them:\n")[2]
    assert told.startswith("  test_some.py::test_it[1]\n      Skipped: no GPU here")


def test_a_skipped_module_must_be_named_too(tmp_path):
    module = "pytest.importorskip('a_module_that_nobody_has')\ndef test_it(): pass"
    assert run_of(tmp_path, "-n 1", some=module, good="def test_a(): pass")[0] == 1


def test_a_named_skip_passes_and_is_printed_with_its_reason(tmp_path):
    code, output = run_of(
        tmp_path, skips='"test_some.py::test_it" = "needs a GPU"', some=SKIPPED, good="def test_a(): pass"
    )
    assert code == 0
    assert "SKIPPED [2] test_some.py" in output
    assert "no GPU here" in output
    assert re.fullmatch(r"1 passed, 2 skipped in \d.*s", last_line(output))
