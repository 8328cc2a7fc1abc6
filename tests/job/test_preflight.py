"""What a preflight says of broken clusters, from facts alone. A cluster with real nodes is in
tests/run/test_cluster.py."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncrl_cli.base.errors import PreflightError
from asyncrl_cli.job.driver_preflight import NodeFacts, Wanted, ahead_s, findings, refuse, token_in
from asyncrl_cli.job.node_probe import Probe
from asyncrl_cli.plan.machine import Finding
from asyncrl_cli.profile.schema import ModelSection, RefSection

from .crew import small_profile

VERSIONS = {"asyncrl": "0.1.0", "ray": "2.60.0", "torch": "2.13.0+cpu", "transformers": "5.19.0"}
HERE = NodeFacts(
    address="10.0.0.1",
    python="3.11.9",
    versions=VERSIONS,
    shared_memory_bytes=8 * 2**30,
    interfaces=("lo", "eth0"),
    own_address="10.0.0.1",
)
WANTED = Wanted(
    directory=Path("/shared/runs/otter"),
    models={"model.path": "/models/qwen", "ref.path": "/hub/snapshots/abc", "critic.path": "/cache/tiny-1"},
    downloads={"ref.path": "Qwen/Qwen3-0.6B"},
    builtin={"critic.path"},
)


def found(*wrong: dict[str, Any]) -> list[Finding]:
    """Of nodes 10.0.0.1, 10.0.0.2, ... that are as the driver's, but for these facts."""
    there = [replace(HERE, address=f"10.0.0.{number}", **facts) for number, facts in enumerate(wrong, 1)]
    return list(findings(HERE, there, WANTED))


def test_nodes_like_the_drivers_are_fine_and_may_have_another_build_and_patch():
    lines = found({}, {"python": "3.11.2", "versions": VERSIONS | {"torch": "2.13.0+cu130"}})
    assert [(line.what, line.ok) for line in lines] == [("10.0.0.1", True), ("10.0.0.2", True)]
    assert "torch 2.13.0+cu130" in lines[1].found
    assert refuse(lines) == []


GATED = PreflightError(
    "the probe on 10.0.0.2: model.path: the hub gives it only to users who have logged in",
    hint="hf auth login",
)
NOT_SHARED = "No such file or directory: /shared/runs/otter/.preflight-1"
BROKEN = [
    (
        {"versions": VERSIONS | {"torch": "2.12.1"}},
        "torch 2.12.1, and 2.13.0 on the driver's",
        "torch 2.13.0",
    ),
    ({"versions": VERSIONS | {"asyncrl": ""}}, "asyncrl is missing", "asyncrl 0.1.0"),
    ({"python": "3.12.1"}, "python 3.12, and 3.11", "python 3.11"),
    ({"directory_error": NOT_SHARED}, "not see what the driver writes to /shared/runs/otter", "--runs-dir"),
    ({"missing_models": ("model.path",)}, "model.path: there is no /models/qwen", "--set model.path="),
    ({"missing_models": ("ref.path",)}, "ref.path: there is no /hub/snapshots/abc", "HF_HOME"),
    (
        {"not_fetched": {"ref.path": GATED}},
        "ref.path: Qwen/Qwen3-0.6B cannot be downloaded there: the hub gives it only to users who have "
        "logged in",
        "hf auth login",
    ),
    ({"missing_models": ("critic.path",)}, "there is no /cache/tiny-1", "--set model.cache_dir="),
    ({"unreached": "10.0.0.1:4321: timed out"}, "cannot reach 10.0.0.1:4321: timed out", "open all ports"),
    ({"variables": {"NCCL_SOCKET_IFNAME": "ib0"}}, "NCCL_SOCKET_IFNAME=ib0", "eth0"),
    ({"own_address": "127.0.1.1"}, "its host name resolves to 127.0.1.1", "GLOO_SOCKET_IFNAME=eth0"),
    ({"error": "its process ended"}, "its process ended", "ray status"),
]


@pytest.mark.parametrize(("facts", "problem", "fix"), BROKEN)
def test_a_broken_node_is_refused_by_its_address_with_a_fix(facts, problem, fix):
    with pytest.raises(PreflightError) as refused:
        refuse(found({}, facts))
    assert refused.value.exit_code == 3
    (line,) = refused.value.message.split("\n")[1:]
    assert line.startswith("  - 10.0.0.2: ")
    assert problem in line
    assert fix in refused.value.hint


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"ahead_s": 42.0}, "10.0.0.2: its clock is 42 s ahead of the driver's (run chrony"),
        ({"ahead_s": -42.0}, "42 s behind"),
        ({"shared_memory_bytes": 64 * 2**20}, "64 MiB free in /dev/shm"),
    ],
)
def test_skewed_clocks_and_small_shared_memory_are_warned_of(facts, said):
    (warning,) = refuse(found({}, facts))
    assert said in warning


def test_all_problems_of_all_nodes_are_told_at_once():
    with pytest.raises(PreflightError) as refused:
        refuse(found({"python": "3.10.1", "missing_models": ("model.path",)}, {"error": "silent"}))
    assert refused.value.message.count("\n  - ") == 3
    assert refused.value.hint.count("\n") == 2


def test_a_clock_is_ahead_only_as_far_as_the_way_of_its_answer_cannot_explain():
    assert ahead_s(10.0, 10.4, 11.0) == 0.0
    assert ahead_s(10.0, 13.0, 11.0) == 2.0
    assert ahead_s(10.0, 9.0, 11.0) == -1.0


def test_nodes_are_asked_for_the_models_that_were_found_before():
    profile = small_profile().model_copy(
        update={"model": ModelSection(path="builtin:tiny"), "ref": RefSection(path="Qwen/Qwen3-0.6B")}
    )
    wanted = Wanted.of(profile, Path("/cache/tiny-1"), {"ref_dir": "/hub/snapshots/abc"}, Path("/runs/otter"))
    assert wanted.models == {"model.path": "/cache/tiny-1", "ref.path": "/hub/snapshots/abc"}
    assert (wanted.downloads, wanted.builtin) == ({"ref.path": "Qwen/Qwen3-0.6B"}, {"model.path"})


def test_a_probe_reads_the_token_and_writes_beside_it(tmp_path):
    (tmp_path / "token").write_text("token")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    models = {"model.path": str(tmp_path / "model"), "ref.path": str(tmp_path / "none")}
    facts = NodeFacts(
        address="here", **Probe().look(("ray", "no-such-package"), str(tmp_path), "token", models)
    )
    assert (facts.directory_error, facts.missing_models) == ("", ("ref.path",))
    assert facts.versions["no-such-package"] == "" != facts.versions["ray"]
    assert len(list(tmp_path.glob("token.*"))) == 1
    (tmp_path / "other").write_text("token")
    assert "another directory" in Probe().look((), str(tmp_path), "other", {})["directory_error"]
    assert "No such file" in Probe().look((), str(tmp_path / "none"), "token", {})["directory_error"]


def test_the_token_and_what_probes_write_beside_it_go_also_where_somebody_else_removes_some(
    tmp_path, monkeypatch
):
    async def main() -> None:
        async with token_in(tmp_path) as token:
            (tmp_path / f"{token}.node").touch()

    found = Path.glob

    def glob(directory: Path, pattern: str) -> list[Path]:
        paths = list(found(directory, pattern))
        paths[0].unlink()
        return paths

    monkeypatch.setattr(Path, "glob", glob)
    asyncio.run(main())
    assert not list(tmp_path.iterdir())


def test_a_probe_reaches_a_port_that_listens_and_no_other():
    listening, asking = Probe(), Probe()
    assert asking.reach("127.0.0.1", listening.listen(), 60.0) == ""
    listening.listening.close()
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        assert "refused" in asking.reach("127.0.0.1", bound.getsockname()[1], 60.0)
