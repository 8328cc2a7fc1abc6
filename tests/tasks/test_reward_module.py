"""Reward modules of the user's: what is wrong with one is told before a run starts, in time; a resume imports
the run's own."""

from __future__ import annotations

import json
import os
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from tests.marks import one_in

from asyncrl_cli.base import named_code
from asyncrl_cli.base.errors import AsyncrlError, ConfigError, RefusedError
from asyncrl_cli.base.named_code import UserCode
from asyncrl_cli.cli.app import run
from asyncrl_cli.contracts.environment import RewardSpec
from asyncrl_cli.profile.loaded import load
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.tasks import code_choice
from asyncrl_cli.tasks.code_choice import check_fields, keep_record, origin, resolve_reward
from asyncrl_cli.tasks.task import Task, load_task

GOOD = "def score(item, response):\n    return 1.0\n"
LIMIT_S = 60.0
"""The modules that hang would take ten minutes."""
MODULES = {
    "hangs beside a process of its own": (
        "import os, time\nos.fork()\ntime.sleep(600)",
        "not imported within 1 s",
    ),
    "loops": ("while True: pass", "not imported within 1 s"),
    "ignores signals": (
        "import signal, time\nsignal.signal(15, signal.SIG_IGN)\ntime.sleep(600)",
        "not imported within 1 s",
    ),
    "reads stdin": ("input()", "EOFError"),
    "raises": ("1 / 0", r"ZeroDivisionError: division by zero \(bad.py:1\)"),
    "raises what no except catches": ("raise KeyboardInterrupt", "ended with .*KeyboardInterrupt|SIGINT"),
    "raises without end": ("def f(): f()\nf()", "RecursionError"),
    "raises with 1 MB of words": ("raise ValueError('x' * 1_000_000)", "ValueError: xxx"),
    "raises with half a surrogate pair": ("raise ValueError('\\ud800')", "ValueError"),
    "exits": ("import sys; sys.exit(3)", "SystemExit: 3"),
    "exits at once": ("import os; os._exit(0)", "its process ended with exit code 0"),
    "is killed": ("import os; os.kill(os.getpid(), 9)", "its process ended with SIGKILL"),
    "crashes": ("import ctypes; ctypes.string_at(0)", "its process ended with SIGSEGV"),
    "closes all files": ("import os; os.closerange(0, 64)", "its process ended with exit code"),
    "is no Python": ("def score(:", "SyntaxError"),
    "is not UTF-8": ("x = '\udcff'", "SyntaxError"),
    "imports what is not there": (
        "import nothing_of_this_name",
        "ModuleNotFoundError: No module named 'nothing_of_this_name'",
    ),
    "is empty": ("", "AttributeError: module 'bad' has no attribute 'score'"),
    "has a number": ("score = 3", "score is not a function but int"),
    "has a coroutine": ("async def f(): ...\nscore = f()", "score is not a function but coroutine"),
    "has a class": (
        "class score:\n    def __init__(self, item, response): ...",
        "score is a class; name a function, or an instance",
    ),
    "has an instance that cannot be called": ("class C: ...\nscore = C()", "score is not a function but C"),
    "has a generator": ("def score(item, response):\n    yield 1.0", "score yields values"),
    "has an instance that yields": (
        "class C:\n    async def __call__(self, item, response):\n        yield 1.0\nscore = C()",
        "score yields values",
    ),
    "takes nothing": ("def score(): return 1.0", r"score\(\) cannot be called with \(item, response\)"),
    "takes one": ("def score(item): return 1.0", "cannot be called with"),
    "asks for ids of TRL": ("def score(completions, completion_ids, **kw): ...", "asks for completion_ids"),
    "asks for a name": ("def score(item, response, *, key): return 1.0", "cannot be called with"),
}


@pytest.mark.parametrize("name", one_in(4, MODULES))
def test_a_bad_reward_module_is_refused_in_time_with_its_name_and_a_hint(tmp_path, monkeypatch, name):
    source, expected = MODULES[name]
    (tmp_path / "bad.py").write_bytes(source.encode("utf-8", "surrogateescape"))
    assert_refused(tmp_path, monkeypatch, "bad:score", expected)


def resolved(reward: str, **task: float) -> RewardSpec:
    return resolve_reward(
        Profile.model_validate({"task": {"reward": reward, **task}}), RewardSpec(kind="none"), None
    )[0]


def assert_refused(directory: Path, monkeypatch: pytest.MonkeyPatch, reward: str, expected: str) -> None:
    monkeypatch.chdir(directory)
    monkeypatch.setattr(code_choice, "START_LIMIT_S", 1.0 if "within 1 s" in expected else LIMIT_S)
    began_s = time.monotonic()
    with pytest.raises(ConfigError, match=expected) as refused:
        resolved(reward, reward_timeout_s=0.1)
    assert time.monotonic() - began_s < LIMIT_S
    assert f'task.reward = "{reward}"' in refused.value.message
    assert len(refused.value.message.encode("utf-8")) < 1000
    assert refused.value.hint


@pytest.mark.parametrize("ends", ["", "import os; os._exit(3)\n"])
def test_of_a_module_that_prints_without_end_only_the_last_words_are_shown(
    tmp_path, monkeypatch, capfd, ends
):
    (tmp_path / "loud.py").write_text(f"print('x' * 5_000_000 + 'the end', end='')\n{ends}{GOOD}")
    monkeypatch.chdir(tmp_path)
    if ends:
        assert_refused(tmp_path, monkeypatch, "loud:score", "its process ended with exit code 3: xxx")
        return
    resolved("loud:score")
    told = capfd.readouterr().err
    assert "the end" in told
    assert "left out the first 4,998,007 bytes" in told
    assert len(told) < 3000


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        ("pipe:score", "No module named 'pipe'"),
        ("directory:score", "has no attribute 'score'"),
        ("nowhere:score", "No module named 'nowhere'"),
        ("x" * 300 + ":score", "No module named 'xxx"),
        (".relative:score", "TypeError|ImportError|ValueError"),
        ("a..b:score", "No module named 'a'"),
        ("builtins:len", "cannot be called with"),
        ("json:dumps.nothing", "has no attribute 'nothing'"),
    ],
)
def test_a_module_that_is_none_is_refused(tmp_path, monkeypatch, reward, expected):
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "directory").mkdir()
    assert_refused(tmp_path, monkeypatch, reward, expected)


GOOD_MODULES = {
    "a function": GOOD,
    "an async function": "async def score(item, response):\n    return 1.0\n",
    "an instance": "class C:\n    def __call__(self, item, response): return 1.0\nscore = C()",
    "a method": "class C:\n    def f(self, item, response): return 1.0\nscore = C().f",
    "a partial": "import functools\ndef f(x, item, response): return 1.0\nscore = functools.partial(f, 1)",
    "further arguments": "def score(item, response, scale=1.0, **others): return scale",
    "a thread that never ends": "import threading, time\nthreading.Thread(target=time.sleep, "
    "args=(600,)).start()\n" + GOOD,
    "a process that never ends": "import os, time\nif os.fork() == 0:\n    time.sleep(600)\n" + GOOD,
    "2 MB of words": "print('x' * 2_000_000)\n" + GOOD,
}


@pytest.mark.parametrize("name", one_in(4, GOOD_MODULES))
def test_a_module_that_will_do_is_taken(tmp_path, monkeypatch, name):
    (tmp_path / "good.py").write_text(GOOD_MODULES[name])
    monkeypatch.chdir(tmp_path)
    # a call that waited for what never ends would be refused after it
    monkeypatch.setattr(code_choice, "START_LIMIT_S", LIMIT_S)
    spec = resolved("good:score")
    assert spec.function is not None
    assert spec.function.file == str(tmp_path / "good.py")


@pytest.mark.slow
def test_a_module_beside_the_profile_is_found_from_anywhere_and_before_others_of_its_name(
    tmp_path, monkeypatch
):
    mine, elsewhere = tmp_path / "mine", tmp_path / "elsewhere"
    for directory in (mine, elsewhere):
        directory.mkdir()
        (directory / "good.py").write_text(GOOD)
    (elsewhere / "other.py").write_text(GOOD)
    (mine / "my.toml").write_text('extends = "base"\n[task]\nreward = "good:score"\n')
    monkeypatch.chdir(elsewhere)
    for sets, found in (((), mine / "good.py"), (("task.reward=other:score",), elsewhere / "other.py")):
        assert load_task(load(str(mine / "my.toml"), sets, environ={}).profile).reward.function.file == str(
            found
        )
    assert load("base", ["task.reward=good:score"], environ={}).profile.task.import_path is None


def test_an_import_may_take_as_long_as_a_reward(tmp_path, monkeypatch):
    (tmp_path / "good.py").write_text("import time; time.sleep(0.3)\n" + GOOD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(code_choice, "START_LIMIT_S", 0.2)
    assert resolved("good:score", reward_timeout_s=20.0).kind == "function"


def test_a_dry_run_refuses_a_reward_and_a_file_as_a_run_does(tmp_path, monkeypatch, capsys):
    (tmp_path / "bad.py").write_text("async def score(item, response):\n    yield 1.0\n")
    (tmp_path / "data.jsonl").write_text('{"prompt": "x", "answer": "1"}\nnull\n')
    monkeypatch.chdir(tmp_path)
    dry_run = ["train", "-p", "base", "--dry-run", "--set"]
    assert run([*dry_run, "task.reward=bad:score"]) == 2
    assert "score yields values" in capsys.readouterr().err
    assert run([*dry_run, "task.source=jsonl:data.jsonl"]) == 2
    assert "data.jsonl:2: not a JSON object" in capsys.readouterr().err


def test_a_dry_run_says_what_is_left_out(tmp_path, monkeypatch, capsys):
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps({"prompt": str(i), "answer": "1"}) + "\n" for i in range(100))
    )
    monkeypatch.chdir(tmp_path)
    sets = (
        "task.source=jsonl:data.jsonl",
        "eval.prompts=10",
        "task.train_prompts=60",
        "model.path=Qwen/Qwen3-0.6B",
    )
    assert (
        run(["train", "-p", "base", "--dry-run", *(word for text in sets for word in ("--set", text))]) == 0
    )
    assert "data.jsonl: left out its last 30 rows: task.train_prompts = 60" in capsys.readouterr().err


def test_a_dry_run_holds_out_as_many_prompts_as_a_run_with_the_models_defaults(tmp_path, monkeypatch, capsys):
    """64 of 300 for a pretrained model on CPUs, not the 512 of the tiny model."""
    rows = (json.dumps({"prompt": str(i), "answer": "1"}) + "\n" for i in range(300))
    (tmp_path / "data.jsonl").write_text("".join(rows))
    monkeypatch.chdir(tmp_path)
    sets = ("task.source=jsonl:data.jsonl", "placement.device=cpu", "model.path=Qwen/Qwen3-0.6B")
    code = run(["train", "-p", "base", "--dry-run", *(f"--set={text}" for text in sets)])
    assert code == 0, capsys.readouterr().err


@pytest.fixture
def began(tmp_path, monkeypatch) -> Path:
    """The directory of a run that has begun in `home` and is resumed from `elsewhere`, where other modules of
    that name lie."""
    home, elsewhere, run_dir = tmp_path / "home", tmp_path / "elsewhere", tmp_path / "run"
    for directory in (home / "package", elsewhere / "package", run_dir):
        directory.mkdir(parents=True)
    evil = f"open({str(tmp_path / 'executed')!r}, 'w')\n" + GOOD
    for name in ("mine.py", "package/__init__.py", "package/inner.py"):
        (home / name).write_text(GOOD)
        (elsewhere / name).write_text(evil)
    (tmp_path / "data.jsonl").write_text('{"prompt": "x", "answer": "1"}\n{"prompt": "y", "answer": "1"}\n')
    monkeypatch.chdir(home)
    return run_dir


def task_of(run_dir: Path, reward: str | list[str], *, resumed: bool) -> Task:
    task = {"source": f"jsonl:{run_dir.parent}/data.jsonl", "reward": reward}
    profile = Profile.model_validate({"task": task, "eval": {"prompts": 1}})
    loaded = load_task(profile, run_dir if resumed else None)
    for record, code in loaded.user_code.items():
        keep_record(run_dir, record, code)
    return loaded


@pytest.mark.parametrize(
    ("reward", "file"),
    [
        ("mine:score", "mine.py"),
        ("package:score", "package/__init__.py"),
        ("package.inner:score", "package/inner.py"),
    ],
)
def test_a_resume_imports_the_module_from_where_the_run_began_and_says_so(began, monkeypatch, reward, file):
    assert origin(began, "reward", task_of(began, reward, resumed=False).reward.function) == ""
    monkeypatch.chdir(began.parent / "elsewhere")
    task = task_of(began, reward, resumed=True)
    assert task.reward.function.file == str(began.parent / "home" / file)
    assert task.notes == (), "no warning"
    told = origin(began, "reward", task.reward.function)
    assert told == f"task.reward is imported from {began.parent}/home/{file}, as {began}/reward.json says"
    assert not (began.parent / "executed").exists()


def test_each_of_several_rewards_is_resumed_from_where_the_run_began(began, monkeypatch):
    rewards = ["mine:score", "exact-match", "package.inner:score"]
    task_of(began, rewards, resumed=False)
    monkeypatch.chdir(began.parent / "elsewhere")
    files = [code.file for code in task_of(began, rewards, resumed=True).reward.functions]
    assert files == [str(began.parent / "home" / file) for file in ("mine.py", "package/inner.py")]
    assert not (began.parent / "executed").exists()
    (began / "reward-2.json").unlink()
    with pytest.raises(RefusedError, match=r"reward-2.json is missing"):
        task_of(began, rewards, resumed=True)


def test_a_scorers_class_is_resumed_from_where_the_run_began(began, monkeypatch):
    home, elsewhere = began.parent / "home", began.parent / "elsewhere"
    declared = "from asyncrl_cli.data.sample_fields import Field\n"
    declared += "FIELDS = (Field(name='place', per='sampled', by='scorer'),)\n"
    scorer = "class Place:\n    def score(self, groups, items): ...\n"
    (began.parent / "declared.py").write_text(declared)
    for directory in (home, elsewhere):
        (directory / "scoring.py").write_text((directory / "mine.py").read_text() + scorer)
    task = {"fields": "declared:FIELDS", "scorers": {"place": "scoring:Place"}}
    profile = Profile.model_validate({"task": task | {"import_path": str(began.parent)}})
    scorers, _ = check_fields(profile)
    monkeypatch.chdir(elsewhere)
    with pytest.raises(RefusedError, match=r"scorers-place.json is missing"):
        check_fields(profile, began)
    began_task = replace(task_of(began, "exact-match", resumed=False), scorers=scorers)
    assert list(began_task.user_code) == ["scorers-place"]
    keep_record(began, "scorers-place", began_task.user_code["scorers-place"])
    resumed, notes = check_fields(profile, began)
    assert (resumed["place"].file, notes) == (str(home / "scoring.py"), ())
    assert not (began.parent / "executed").exists()


def test_a_module_that_is_gone_is_refused_and_no_other_is_imported(began, monkeypatch):
    task_of(began, "package.inner:score", resumed=False)
    (began.parent / "home" / "package" / "inner.py").unlink()
    monkeypatch.chdir(began.parent / "elsewhere")
    gone = "the run's reward module .*package/inner.py cannot be read: no such file"
    with pytest.raises(RefusedError, match=gone) as refused:
        task_of(began, "package.inner:score", resumed=True)
    assert "imported only from there" in refused.value.hint
    assert not (began.parent / "executed").exists()


def test_a_module_in_an_archive_is_resumed_from_there(began, monkeypatch):
    archive = began.parent / "modules.zip"
    with zipfile.ZipFile(archive, "w") as modules:
        modules.writestr("zipped.py", GOOD)
    monkeypatch.setenv("PYTHONPATH", str(archive))
    task_of(began, "zipped:score", resumed=False)
    monkeypatch.delenv("PYTHONPATH")
    (began.parent / "elsewhere" / "zipped.py").write_text(
        (began.parent / "elsewhere" / "mine.py").read_text()
    )
    monkeypatch.chdir(began.parent / "elsewhere")
    assert task_of(began, "zipped:score", resumed=True).reward.function.file == f"{archive}/zipped.py"
    assert not (began.parent / "executed").exists()


def test_a_package_that_hides_the_module_is_not_imported(began):
    task_of(began, "mine:score", resumed=False)
    (began.parent / "home" / "mine").mkdir()
    (began.parent / "home" / "mine" / "__init__.py").write_text(
        (began.parent / "elsewhere" / "mine.py").read_text()
    )
    with pytest.raises(
        ConfigError, match=r"mine is .*/home/mine/__init__.py here, but the run began with .*/home/mine.py"
    ):
        task_of(began, "mine:score", resumed=True)
    assert not (began.parent / "executed").exists()


def test_a_module_that_has_changed_is_told(began):
    task_of(began, "mine:score", resumed=False)
    (began.parent / "home" / "mine.py").write_text(GOOD + "# changed\n")
    (note,) = task_of(began, "mine:score", resumed=True).notes
    assert note == f"task.reward: {began.parent}/home/mine.py has changed since the run began"


def test_a_module_that_has_no_file_is_resumed_as_such(began, monkeypatch):
    keep_record(began, "reward", UserCode(name="sys:intern"))
    (began.parent / "elsewhere" / "sys.py").write_text(GOOD)
    monkeypatch.chdir(began.parent / "elsewhere")
    with pytest.raises(ConfigError, match="cannot be called with"):
        task_of(began, "sys:intern", resumed=True)


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (None, "reward.json is missing"),
        ("", "reward.json cannot be read"),
        ("null", "reward.json cannot be read"),
        ("[1]", "reward.json cannot be read"),
        ('{"function": "mine:score"}', "reward.json cannot be read"),
        ({"file": 3}, "reward.json cannot be read"),
        ({"file": "a\0b"}, "embedded null byte"),
        ({"file": "/"}, "is a directory"),
        ({"file": "mine.py"}, "the run began with mine.py"),
        ({"file": "/dev/zero"}, "is a device"),
        ({"function": "other:score"}, "is not of this run: it is the record of other:score"),
        ({"schema_version": 2}, "schema 2"),
    ],
)
def test_a_record_that_is_wrong_is_refused(began, record, expected):
    task_of(began, "mine:score", resumed=False)
    path = began / "reward.json"
    if record is None:
        path.unlink()
    else:
        path.write_text(
            record if isinstance(record, str) else json.dumps({**json.loads(path.read_text()), **record})
        )
    with pytest.raises(AsyncrlError, match=expected) as refused:
        task_of(began, "mine:score", resumed=True)
    assert refused.value.exit_code in (2, 4)


def test_rewards_of_ours_need_no_record(began):
    assert task_of(began, "auto", resumed=False).reward.kind == "exact-match"
    assert not (began / "reward.json").exists()
    assert task_of(began, "auto", resumed=True).notes == ()


def test_the_traceback_of_an_error_is_printed_once(capfd, monkeypatch):
    monkeypatch.setattr(named_code, "_PRINTED", set())
    reasons = [named_code.describe_with_traceback(KeyError(text)) for text in ("a", "a", "b", "c", "d")]
    assert reasons[1:3] == ["KeyError: 'a'", "KeyError: 'b'"]
    assert capfd.readouterr().err.splitlines() == ["KeyError: 'a'", "KeyError: 'b'", "KeyError: 'c'"]
