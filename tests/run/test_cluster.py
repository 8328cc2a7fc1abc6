"""A cluster of several nodes, reached by address: a whole run, placement, and the preflight's probes."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

from asyncrl_cli.base.errors import PreflightError
from asyncrl_cli.cli.app import run
from asyncrl_cli.job.ray.session import connected
from asyncrl_cli.plan.compiler import compile_job
from asyncrl_cli.plan.job_plan import JobPlan
from asyncrl_cli.plan.machine import Finding
from asyncrl_cli.profile.loaded import load
from tests.cluster import RayNodes, processes_of, ray_nodes
from tests.run.commands import SMALL, Finished, finish, log_of, start

pytestmark = pytest.mark.slow
GPUS = ("placement.device=cpu", "placement.gpu_bundles=true")
SHAPES = ("trainer.n_gpus_per_node=2", "rollout.n_gpus_per_node=2", "placement.disjoint_nodes=true")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayNodes]:
    with ray_nodes((2, 0), (4, 2), (4, 2)) as nodes:
        yield nodes


def test_a_bench_trains_profiles_for_gpus_on_logical_gpus_of_two_nodes_and_each_keeps_its_promise(
    cluster, tmp_path
):
    # bench sets these itself
    own = ("run.train_steps=10", "checkpoint.every_steps=2", "eval.every_versions=0")
    sets = (
        *(text for text in SMALL if text not in own),
        *GPUS,
        *SHAPES,
        "rollout.n_gpus_per_node=1",
        "rollout.max_response_tokens=24",
        "eval.prompts=0",
    )
    words = ("--compare", "one-step-off", "--profile", "stream-off-policy", "--groups", "48", "--out", "out")
    process = start(tmp_path, "bench", *words, "--address", cluster.address, sets=sets)
    are_there = False
    while process.poll() is None and not are_there:
        are_there = any(
            log_of(found.pid) == "trainer-0.log" for node in cluster.nodes for found in processes_of(node)
        )
        time.sleep(0.2)
    code, out, err = finish(process)
    assert (code, are_there) == (0, True), (out, err)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    base, other = results["results"]
    assert (base["profile"], base["speedup"], other["profile"]) == ("one-step-off", 1.0, "stream-off-policy")
    assert other["speedup"] > 0
    assert (results["groups"], results["simulated"], results["missing"]) == (48, False, [])
    assert all(0 < result["bound_ratio"] <= 1 for result in (base, other))
    table = [line.split() for line in out.splitlines()]
    assert ["speedup", "1.00x", f"{other['speedup']:.2f}x"] in table
    names = {"results.json", "report.md", "report.html", "runs"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    one_step_off, stream = (
        Finished.of(tmp_path / "out" / "runs" / name) for name in ("one-step-off-r0", "stream-off-policy-r0")
    )
    for ran in (one_step_off, stream):
        assert ran.steps[-1]["groups_trained"] == 48
        ran.assert_all_admitted_was_trained(steps=12)
    run = tmp_path / "out" / "runs" / "one-step-off-r0"
    logs = {path.stem for path in (run / "logs" / "latest").glob("*.log")}
    assert logs == {"driver", "trainer-0", "trainer-1", "rollout-0"}
    assert not list(run.glob(".preflight*"))
    # what was sampled one version ago
    assert one_step_off.steps[0]["staleness/max"] == 0
    assert one_step_off.largest("staleness/max") == 1
    assert [step["version"] for step in one_step_off.steps] == [step["step"] for step in one_step_off.steps]
    # each window of four steps on its own version's groups
    assert stream.largest("staleness/max") == 0
    assert [step["staleness/steps_max"] for step in stream.steps] == [0, 1, 2, 3] * 3
    assert [event["version"] for event in stream.named("loaded")] == [0, 1, 2, 3]


def test_plan_and_doctor_look_where_they_are_told(cluster, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")  # as within a job of another cluster
    there = ("--address", cluster.address, "--json")
    sets = [word for text in (*GPUS, *SHAPES) for word in ("--set", text)]
    assert run(["plan", "--profile", "partial-rollout", *sets, *there]) == 0
    rows = {row["node"]: row["would be there"] for row in json.loads(capsys.readouterr().out)["cluster"]}
    assert sorted(rows.values()) == ["", "2 rollout", "2 trainer"]
    assert run(["doctor", "--runs-dir", str(tmp_path), *there]) == 0
    assert {finding["what"] for finding in json.loads(capsys.readouterr().out)} == {"cluster", *rows}


def plan_for(cluster: Any, *sets: str) -> JobPlan:
    return compile_job(load("base", (*GPUS, *sets), environ={}).profile, cluster)


def where(
    plan: JobPlan, timeout_s: float = 60.0, say: Any = lambda text: None, meanwhile: Any = None
) -> dict[str, set[str]]:
    """The nodes of each role, in Ray's own words."""
    from asyncrl_cli.job.ray.placement import nodes_of, placed

    async def main() -> dict[str, set[str]]:
        joining = asyncio.create_task(meanwhile()) if meanwhile else None
        async with placed(plan, timeout_s=timeout_s, say=say) as options:
            groups = {
                role.role: options(role.role, 0)["scheduling_strategy"].placement_group for role in plan.roles
            }
            if joining is not None:
                await joining
            return {name: set(nodes_of([group])) for name, group in groups.items()}

    return asyncio.run(main())


def test_nodes_are_disjoint_packed_role_by_role_labelled_waited_for_and_missed(cluster):
    with connected(cluster.address) as there:
        apart = where(plan_for(there, *SHAPES))
        assert apart["trainer"].isdisjoint(apart["rollout"])
        packed = where(plan_for(there))
        assert len(packed["trainer"]) == len(packed["rollout"]) == 1
        assert packed["trainer"] != packed["rollout"]
        with pytest.raises(PreflightError) as refused:
            plan_for(there, *SHAPES, "rollout.n_gpus_per_node=4")
        assert "finds no node" in refused.value.message
        assert "127.0.0.3: free 2 of 2 GPUs" in refused.value.message
        assert "--set rollout.nnodes=1 --set rollout.n_gpus_per_node=2" in refused.value.hint

        said, is_waiting = list[str](), asyncio.Event()
        waiting = plan_for(there, *SHAPES, 'placement.rollout_labels={zone="b"}', "placement.autoscaler=true")
        with pytest.raises(PreflightError, match=r"no room within placement\.timeout_s = 5 s") as missed:
            where(waiting, timeout_s=5.0)
        assert "--set placement.rollout_labels={}" in missed.value.hint

        async def join() -> None:
            await is_waiting.wait()
            cluster.add(4, 2, zone="b")

        def say(text: str) -> None:
            said.append(text)
            is_waiting.set()

        found = where(waiting, say=say, meanwhile=join)
        assert "waiting for an autoscaler" in said[0]
        assert found["rollout"] == {cluster.nodes[-1].node_id}
        assert (
            cluster.nodes[-1].node_id
            not in where(plan_for(there, *SHAPES, 'placement.rollout_labels={zone="!b"}'))["rollout"]
        )
        wait_until_all_is_free()


def wait_until_all_is_free() -> None:
    """Nothing stays reserved, and Ray's view of what is free, which lags behind, says so."""
    from asyncrl_cli.job.ray.placement import ray_cluster

    deadline_s = time.monotonic() + 60
    while (free := ray_cluster(free=True)) != (whole := ray_cluster()):
        assert time.monotonic() < deadline_s, (str(free), str(whole))
        time.sleep(0.1)


def test_probes_tell_what_is_wrong_on_which_node(cluster, tmp_path, monkeypatch):
    from asyncrl_cli.job.driver_preflight import Wanted, cluster_findings, examined

    about, *found = cluster_findings(cluster.address, tmp_path / "runs", lambda text: None)
    assert "127.0.0.3: free 2 of 2 GPUs" in about.found
    assert [finding.ok for finding in found] == [True] * len(cluster.nodes), found
    (tmp_path / "transformers-5.0.dist-info").mkdir()
    (tmp_path / "transformers-5.0.dist-info" / "METADATA").write_text("Name: transformers\nVersion: 5.0\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib9")
    odd = cluster.add(1)
    wanted = Wanted(directory=tmp_path, models={"model.path": str(tmp_path / "none")})
    with connected(cluster.address) as there:
        nodes = {node.id: node.name for node in there.nodes}
        found = asyncio.run(examined(nodes, wanted, lambda text: None))
    wrong: dict[str, list[Finding]] = {}
    for finding in found:
        wrong.setdefault(finding.what, []).append(finding)
    assert wrong.keys() == set(nodes.values())
    assert all(
        any("model.path: there is no" in finding.found for finding in findings) for findings in wrong.values()
    )
    assert [name for name, findings in wrong.items() if len(findings) > 1] == [nodes[odd.node_id]]
    assert "transformers 5.0, and" in wrong[nodes[odd.node_id]][0].found
    assert not list(tmp_path.glob(".preflight*"))
