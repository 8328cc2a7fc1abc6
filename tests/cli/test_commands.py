from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from asyncrl_cli.cli.app import app, run

NAMES = (
    "train submit resume watch status compare stop logs export report serve plan doctor init schema profiles"
)
COMMANDS = NAMES.split()


def test_help_lists_every_command_and_teaches_the_first_one(capsys):
    assert run(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(command in out for command in COMMANDS)
    assert "asyncrl train --profile partial-rollout" in out


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_has_examples(command, capsys):
    assert run([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert "Examples" in out
    assert f"asyncrl {command}" in out


@pytest.mark.parametrize("command", ["plan", "bench", "profiles", "profiles show"])
def test_examples_are_not_folded_on_80_columns(command, capsys, monkeypatch):
    from asyncrl_cli.cli import bench, plan, shipped

    examples = {
        "plan": plan.PLAN_EXAMPLES,
        "bench": bench.EXAMPLES,
        "profiles": shipped.PROFILES_EXAMPLES,
        "profiles show": shipped.SHOW_EXAMPLES,
    }
    monkeypatch.setenv("COLUMNS", "80")
    assert run([*command.split(), "--help"]) == 0
    shown = {line.strip() for line in capsys.readouterr().out.splitlines()}
    lines = [line.strip() for line in examples[command].splitlines() if line.startswith("  asyncrl")]
    assert len(lines) >= 2
    assert [line for line in lines if line not in shown] == []


@pytest.mark.slow
@pytest.mark.parametrize("command", ["plan -p base --gpus 2", "--version"])
def test_a_reader_that_goes_away_is_no_error(command):
    """As `| head` does, or `| true`."""
    reading, writing = os.pipe()
    os.close(reading)
    words = [sys.executable, "-m", "asyncrl_cli", *command.split()]
    done = subprocess.run(words, stdout=writing, stderr=subprocess.PIPE, timeout=60, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


def imported_by(*commands: str) -> set[str]:
    """Top-level modules in a fresh interpreter after these command lines."""
    runs = "".join(f"assert run({command.split()!r}) == 0\n" for command in commands)
    code = f"import sys\nfrom asyncrl_cli.cli.app import run\n{runs}print(*sys.modules, file=sys.stderr)"
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


def test_help_imports_nothing_heavy():
    heavy = "torch ray transformers pydantic numpy wandb asyncio annotated_types"
    assert not imported_by("--help") & set(heavy.split())


@pytest.mark.slow
def test_plans_and_profiles_need_neither_ray_nor_torch():
    heavy = {"torch", "ray", "transformers", "numpy", "wandb"}
    assert not imported_by("plan -p base", "profiles", "train -p base --dry-run") & heavy


def test_the_version_is_data(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("asyncrl ")


def test_profiles_lists_the_six_modes_as_json(capsys):
    assert run(["profiles", "--json"]) == 0
    modes = {row["name"]: row["mode"] for row in json.loads(capsys.readouterr().out)}
    others = [modes.pop(name) for name in ("base", "agent-calculator", "agent-guess")]
    assert set(others) == {"on-policy-pipeline"}
    assert modes == {name: name for name in modes}
    assert len(modes) == 6


def test_profiles_lists_the_workloads_with_their_rows(capsys):
    assert run(["profiles", "--workloads", "--json"]) == 0
    rows = {row["name"]: row["rows"] for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == sorted(path.stem for path in Path("profiles/workloads").glob("*.toml"))
    assert rows["trl-1.5b-lora"] == ["2:2, queue 476"]


def test_show_prints_a_profile_that_can_be_trained(capsys, tmp_path):
    assert run(["profiles", "show", "stale-samples", "--origin", "--set", "run.seed=3"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert "# --set" in shown.out
    (tmp_path / "copy.toml").write_text(shown.out, encoding="utf-8")
    assert run(["plan", "--profile", str(tmp_path / "copy.toml"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schedule"]["mode"] == "stale-samples"


def test_the_keys_are_printed_as_toml(capsys):
    assert run(["profiles", "keys"]) == 0
    out = capsys.readouterr().out
    parsed = tomllib.loads(out)
    assert parsed["async_training"]["partial_rollout"] is False
    assert parsed["rollout"]["stop"] == []
    assert parsed["async_training"]["on_stale"] == "wait"
    assert "# async_training.max_staleness is not set by default  # an integer of at least 0" in out
    assert not {"None", "True", "False", "()"} & set(out.split())
    assert run(["profiles", "keys", "async_training", "--json"]) == 0
    defaults = {row["key"]: row["default"] for row in json.loads(capsys.readouterr().out)}
    assert defaults["async_training.partial_rollout"] is False
    assert defaults["async_training.max_staleness"] is None
    assert run(["profiles", "keys", "rollout.n"]) == 0
    assert tomllib.loads(capsys.readouterr().out) == {"rollout": {"n": 8}}
    assert run(["profiles", "keys", "rolout"]) == 2
    assert "did you mean rollout?" in capsys.readouterr().err


@pytest.mark.usefixtures("quick_task")
def test_a_plan_says_budget_bound_and_bundles(capsys):
    sets = ["--set", "run.train_steps=9", "--set", "async_training.trigger_parameter_sync_step=2"]
    assert run(["plan", "--profile", "partial-rollout", *sets, "--gpus", "8", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    schedule = plan["schedule"]
    # K = 2, R = 16: W = K R = 32 groups, budget (1 + eta) W with eta = 0.5, and 9 steps are 4 windows and a
    # half.
    assert (schedule["window_groups"], schedule["budget_groups"], schedule["max_staleness"]) == (32, 48, 1)
    assert (schedule["groups"], schedule["syncs"], schedule["last_window_groups"]) == (144, 5, 16)
    roles = {role["role"]: role["workers"] for role in plan["placement"]["roles"]}
    assert roles == {"trainer": 4, "rollout": 4}


@pytest.mark.slow
def test_a_dry_run_prints_the_plan_and_leaves_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["train", "--profile", "colocate", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "colocate" in out
    assert "budget" in out
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_refuses_a_model_that_could_not_be_made(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prompts = '{"prompt": "1 + 1", "answer": "2"}\n{"prompt": "1 + 2", "answer": "3"}\n'
    Path("prompts.jsonl").write_text(prompts, encoding="utf-8")
    sets = ["--set", "task.source=jsonl:prompts.jsonl", "--set", "eval.prompts=1"]
    assert run(["train", "--profile", "base", *sets, "--dry-run"]) == 2
    assert "learns from demonstrations, and jsonl:" in capsys.readouterr().err


def test_a_train_that_is_refused_leaves_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--set", "model.path=./missing", "--name", "first", "--ui", "none"]
    refused = ["train", "--profile", "base", *options]
    for _ in range(2):
        assert run(refused) == 3
        assert list(tmp_path.iterdir()) == []
        capsys.readouterr()
    Path("runs").mkdir()
    assert run(refused) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]  # it was there
    Path("runs/.first-detached.out").write_text("what it said", encoding="utf-8")
    capsys.readouterr()
    assert run(["status", "first"]) == 2
    hint = " ".join(capsys.readouterr().err.split())
    assert "if it failed to start, runs/.first-detached.out says why" in hint


def test_doctor_names_versions_and_engines(capsys, monkeypatch):
    from asyncrl_cli.engines.vllm import vllm_kind
    from asyncrl_cli.plan import machine

    monkeypatch.setattr(vllm_kind, "STRAY_PACKAGES", ())  # what else is installed here
    monkeypatch.setattr(machine, "failure_of", lambda program, waiting: "")
    assert run(["doctor", "--json"]) == 0
    found = {finding["what"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert found["transformers"]["found"] == "5.19.0"
    assert {"ray", "machine", "CPU", "threads", "GPUs", "engine transformers", "engine vllm"} <= set(found)


@pytest.mark.parametrize(
    ("cpuinfo", "named", "meaning"),
    [
        (
            "model name\t: A CPU\nflags\t\t: sse2 avx2\n\nflags : amx_bf16\n",
            "A CPU: avx2;",
            "has no bfloat16",
        ),
        ("flags\t\t: avx2 avx512f avx512_bf16\n", "avx2 avx512f avx512_bf16;", "computes in bfloat16"),
        ("Features\t: fp asimd bf16\n", "asimd bf16;", "computes in bfloat16 as well"),
        ("flags\t\t: fpu sse2\n", "no vector instructions", "has no bfloat16 instructions"),
        ("", "not known", "not known"),
    ],
)
def test_doctor_says_what_the_cpu_computes_with_and_what_it_means(
    tmp_path, monkeypatch, cpuinfo, named, meaning
):
    from asyncrl_cli.plan import processor
    from asyncrl_cli.plan.machine import cpu_finding

    (tmp_path / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "cpuinfo")
    assert named in cpu_finding().found
    assert meaning in cpu_finding().found


def test_doctor_says_when_what_else_runs_takes_its_share(monkeypatch):
    from asyncrl_cli.plan.machine import threads_finding

    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    for load, busy in ((0.2, False), (1.0, True)):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert ("other processes are using the cores" in threads_finding().found) is busy
        assert f"load {load} on 2 cores" in threads_finding().found


def test_doctor_exits_with_3_if_something_needed_is_missing(capsys, monkeypatch):
    from asyncrl_cli.plan import machine

    monkeypatch.setattr(machine, "NEEDED", {"no-such-package": "1.2."})
    monkeypatch.setattr(machine, "failure_of", lambda program, waiting: "")
    assert run(["doctor"]) == 3
    assert "no-such-package==1.2.*" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("version", "fails", "found", "code"),
    [
        (None, "", "not installed (optional)", 0),
        ("{0}", "", "{0}, imports", 0),
        ("{0}+cpu", "ImportError: no.so", "{0}+cpu, cannot be imported: ImportError: no.so", 3),
        ("0.1.0", "", "0.1.0, asyncrl works with {0} (optional)", 0),
    ],
)
@pytest.mark.parametrize(
    ("what", "wanted", "module", "install"),
    [
        ("engine vllm", "0.32.0", "vllm", "pip install 'vllm"),
        ("TransferQueue", "0.1.11", "transfer_queue", "pip install 'asyncrl-cli[transferqueue]'"),
    ],
)
def test_doctor_imports_an_optional_package_before_it_says_that_it_is_there(
    what, wanted, module, install, version, fails, found, code, capsys, monkeypatch
):
    from asyncrl_cli.data import transferqueue_package
    from asyncrl_cli.engines.vllm import vllm_kind
    from asyncrl_cli.plan import machine

    monkeypatch.setattr(vllm_kind, "STRAY_PACKAGES", ())
    monkeypatch.setattr(machine, "failure_of", lambda program, waiting: fails if module in program else "")
    versions = {"engine vllm": None, "TransferQueue": None, what: version and version.format(wanted)}
    monkeypatch.setattr(vllm_kind, "installed_version", lambda: versions["engine vllm"])
    monkeypatch.setattr(transferqueue_package, "installed_version", lambda: versions["TransferQueue"])
    assert run(["doctor", "--json"]) == code
    (row,) = [row for row in json.loads(capsys.readouterr().out) if row["what"] == what]
    assert row["found"] == found.format(wanted)
    assert row["ok"] is (None if "optional" in found else code == 0)
    assert row["ok"] or install in row["hint"]


def test_an_import_is_tried_in_a_process_of_its_own(tmp_path, monkeypatch):
    from asyncrl_cli.plan import machine

    breaks = "import warnings\nraise ImportError('no such symbol')\n"
    (tmp_path / "breaks.py").write_text(breaks, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert machine.failure_of("import json") == ""
    assert machine.failure_of("import breaks") == "ImportError: no such symbol"
    assert "breaks" not in sys.modules


def test_an_import_that_takes_too_long_is_given_up_and_says_meanwhile_how_long_it_takes(
    tmp_path, monkeypatch
):
    from asyncrl_cli.engines.vllm import vllm_kind
    from asyncrl_cli.plan import machine

    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(600)\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(machine, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(vllm_kind, "STRAY_PACKAGES", ("hangs",))
    tried = machine.failure_of
    monkeypatch.setattr(
        machine, "failure_of", lambda program, say: tried(program, say) if "hangs" in program else ""
    )
    told: list[str] = []

    def say(doing: str, figures: str = "") -> None:
        told.append(doing)
        if figures and "hangs" in doing:  # it waits: the limit is over at the next look
            monkeypatch.setattr(machine, "IMPORT_TIMEOUT_S", 0)

    monkeypatch.setattr(machine, "NEEDED", {})
    (finding,) = (found for found in machine.examine(say) if found.what == "hangs")
    assert (finding.ok, finding.found) == (None, "not known: `import hangs` takes longer than 0 s")
    assert [doing for doing in told if "hangs" in doing] == ["import hangs (at most 60 s)"] * 2


def test_what_doctor_leaves_after_a_fix_is_looked_at_in_a_fresh_process(monkeypatch):
    from asyncrl_cli.engines.vllm import vllm_kind
    from asyncrl_cli.plan import machine

    ran: list[list[str]] = []

    def child(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        return subprocess.CompletedProcess(command, 3 if "doctor" in command else 0)

    monkeypatch.setattr(vllm_kind, "broken_packages", lambda: ["torchvision"])
    monkeypatch.setattr(machine.subprocess, "run", child)
    monkeypatch.setattr(machine, "examine", lambda say: pytest.fail("looked in this process"))
    assert run(["doctor", "--fix", "--json"]) == 3
    assert [command[1:] for command in ran] == [
        ["-m", "pip", "uninstall", "--yes", "--quiet", "torchvision"],
        ["-m", "asyncrl_cli", "doctor", "--json"],
    ]


def test_init_overwrites_nothing(capsys, tmp_path):
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    assert run(["init", "jsonl", str(tmp_path)]) == 4
    assert "is not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def commands_of(group: Any) -> Iterator[Any]:
    for command in group.commands.values():
        yield from commands_of(command) if hasattr(command, "commands") else [command]


NUMBERS = [
    (command.name, option)
    for command in commands_of(typer.main.get_command(app))
    for option in command.params
    if option.type_descriptor.annotation in (int, float)
]


@pytest.mark.parametrize(
    ("command", "option"), NUMBERS, ids=[f"{command} {option.opts[0]}" for command, option in NUMBERS]
)
@pytest.mark.parametrize("number", ["1e30", "inf", "nan", "9" * 5000])
def test_a_number_that_cannot_be_meant_is_refused(command, option, number, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run([command, option.opts[0], number]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "bug" not in said
    assert option.opts[0] in said or number[:40] in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["logs", "first", "--role", ""], "--role has an empty value"),
        (["logs", "first", "--role="], "--role has an empty value"),
        (["init", "jsonl", ""], "an argument is empty"),
        (["init", ""], "an argument is empty"),
        (["export", "first", "--out", ""], "--out has an empty value"),
        (["status", "--runs-dir="], "--runs-dir has an empty value"),
    ],
)
def test_an_empty_word_is_refused(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(words) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
