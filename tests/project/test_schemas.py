"""The JSON Schemas of profiles and workloads: in step with the code, and true of the shipped files."""

from __future__ import annotations

import json
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from asyncrl_cli.profile.validation import profile_schema
from asyncrl_cli.simulate.workload import workload_schema

ROOT = Path(__file__).resolve().parents[2]
KINDS: dict[str, tuple[Path, Callable[[], dict[str, Any]]]] = {
    "profile": (ROOT / "profiles" / "profile.schema.json", profile_schema),
    "workload": (ROOT / "profiles" / "workloads" / "workload.schema.json", workload_schema),
}
FILES = [
    *(
        ("profile", path)
        for path in sorted([*ROOT.glob("profiles/*.toml"), *ROOT.glob("templates/*/*.toml")])
    ),
    *(("workload", path) for path in sorted(ROOT.glob("profiles/workloads/*.toml"))),
]
TAPLO = shutil.which("taplo")


@pytest.mark.parametrize("kind", KINDS)
def test_the_committed_schema_is_that_of_the_code(kind):
    path, made = KINDS[kind]
    stale = f"stale: asyncrl schema {kind} > {path.relative_to(ROOT)}"
    assert json.loads(path.read_text(encoding="utf-8")) == json.loads(json.dumps(made(), default=str)), stale
    Draft202012Validator.check_schema(made())


@pytest.mark.parametrize(
    ("kind", "path"), FILES, ids=lambda value: getattr(value, "parent", Path(str(value))).name
)
def test_every_shipped_file_names_its_schema_and_keeps_to_it(kind, path):
    text = path.read_text(encoding="utf-8")
    assert text.startswith(f"#:schema ./{kind}.schema.json\n")
    assert [
        error.message for error in Draft202012Validator(KINDS[kind][1]()).iter_errors(tomllib.loads(text))
    ] == []


@pytest.mark.parametrize(
    ("kind", "text", "wrong"),
    [
        ("profile", "[rollout]\nslotz = 3", "slotz"),
        ("profile", "[rollout]\nslots = 0", "minimum"),
        ("profile", '[async_training]\non_stale = "dorp"', "dorp"),
        ("profile", 'extends = "base"\n[trainer]\nlr = "1e-4"', "not of type"),
        ("workload", "[profile.rollout]\nslotz = 3", "slotz"),
        ("workload", "[profiles.colocate.rollout]\nslotz = 3", "slotz"),
    ],
)
def test_the_schema_refuses_what_the_loader_refuses(kind, text, wrong):
    messages = [
        error.message for error in Draft202012Validator(KINDS[kind][1]()).iter_errors(tomllib.loads(text))
    ]
    assert any(wrong in message for message in messages)


@pytest.mark.skipif(TAPLO is None, reason="taplo is not installed")
def test_taplo_accepts_the_shipped_files_and_names_a_misspelt_key(tmp_path):
    def check(*paths: Path) -> subprocess.CompletedProcess[str]:
        command = [str(TAPLO), "check", "--no-auto-config", *map(str, paths)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, check=False)

    shipped = check(*(path for _, path in FILES if path.parent.parent.name != "templates"))
    assert shipped.returncode == 0, shipped.stderr
    shutil.copy(KINDS["profile"][0], tmp_path)
    (tmp_path / "my.toml").write_text(
        "#:schema ./profile.schema.json\n[rollout]\nslotz = 3\n", encoding="utf-8"
    )
    refused = check(tmp_path / "my.toml")
    assert refused.returncode != 0
    assert "slotz" in refused.stderr
