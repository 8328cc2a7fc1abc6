"""Which nodes a plan takes: shapes, strategies, labels, disjoint nodes, and what is said where there is no
room."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest

from asyncrl_cli.base.errors import ConfigError, PreflightError
from asyncrl_cli.cli.plan_report import plan_rows
from asyncrl_cli.plan.cluster import ClusterResources, Unplaced, assigned, matches
from asyncrl_cli.plan.compiler import compile_job
from asyncrl_cli.plan.job_plan import Bundle, JobPlan
from asyncrl_cli.profile.loaded import load

from .crew import nodes

TWO = nodes((64, 8), (64, 8))
FIVE = nodes((16, 0), (64, 8), (64, 8), (64, 8), (64, 8))
NODES = "trainer.nnodes=1 trainer.n_gpus_per_node=8 rollout.nnodes=2 rollout.n_gpus_per_node=8"
COUNTS = "placement.trainer_workers=4 rollout.workers=4"
DISJOINT = "placement.disjoint_nodes=true"


def job(cluster: ClusterResources, *sets: str) -> JobPlan:
    return compile_job(load("base", " ".join(sets).split(), environ={}).profile, cluster)


def where(plan: JobPlan, cluster: ClusterResources) -> dict[str, Counter[str]]:
    found = assigned(plan, cluster)
    assert not isinstance(found, Unplaced), found
    return {name: Counter(on) for name, on in found.items()}


def test_a_shape_is_a_bundle_on_each_of_its_nodes_which_the_processes_share():
    plan = job(FIVE, NODES, "placement.gpus_per_rollout_worker=2", "placement.cpus_per_worker=3")
    assert (plan.trainer_workers, plan.rollout_workers, plan.gpus) == (8, 8, 24)
    assert plan.groups == {"trainer": [Bundle(gpus=8, cpus=24)], "rollout": [Bundle(gpus=8, cpus=12)] * 2}
    rollout = plan.role("rollout")
    assert [plan.bundle_of(rollout, index) for index in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert (rollout.gpus_per_worker, rollout.cpus_per_worker, rollout.threads) == (2, 3, 3)
    assert [row["bundles"] for row in plan_rows(plan)] == ["0", "0-1"]
    assert where(plan, FIVE) == {"trainer": {"node-1": 1}, "rollout": {"node-2": 1, "node-3": 1}}


def test_a_shape_of_one_role_leaves_the_rest_to_the_other():
    plan = job(TWO, "trainer.n_gpus_per_node=4")
    assert (plan.trainer_workers, plan.rollout_workers) == (4, 12)
    plan = job(TWO, "rollout.nnodes=2", "rollout.n_gpus_per_node=6")
    assert (plan.trainer_workers, plan.rollout_workers) == (4, 12)
    colocated = job(TWO, "placement.colocate=true trainer.nnodes=2 trainer.n_gpus_per_node=8")
    assert colocated.groups == {"colocated": [Bundle(gpus=8, cpus=16)] * 2}


@pytest.mark.parametrize(
    ("sets", "keys"),
    [
        ("trainer.nnodes=2", ["trainer.nnodes = 2", "trainer.n_gpus_per_node"]),
        (f"{NODES} placement.trainer_workers=4", ["trainer.nnodes = 1", "placement.trainer_workers = 4"]),
        (f"{NODES} rollout.workers=4", ["rollout.nnodes = 2", "rollout.workers = 4"]),
        ("rollout.n_gpus_per_node=8 placement.gpus_per_rollout_worker=3", ["n_gpus_per_node = 8", "= 3"]),
        (f"{NODES} placement.gpus=16", ["placement.gpus = 16", "need 24"]),
        (f"{NODES} placement.colocate=true", ["rollout.nnodes = 2", "placement.colocate = true"]),
        (f"{NODES} placement.trainer_strategy=spread", ["trainer_strategy", "trainer.n_gpus_per_node = 8"]),
        (f"placement.colocate=true {DISJOINT}", ["placement.disjoint_nodes = true"]),
    ],
)
def test_contradictions_are_refused_with_their_keys(sets, keys):
    with pytest.raises(ConfigError) as refused:
        job(FIVE, sets)
    assert all(key in refused.value.message for key in keys), refused.value.message
    assert refused.value.hint


@pytest.mark.parametrize(
    ("sets", "trainer", "rollout"),
    [
        ("", {"node-1": 4}, {"node-1": 4}),
        ("placement.rollout_strategy=spread", {"node-1": 4}, {f"node-{i}": 1 for i in (1, 2, 3, 4)}),
        ("placement.trainer_strategy=strict_spread", {f"node-{i}": 1 for i in (1, 2, 3, 4)}, {"node-1": 4}),
        (DISJOINT, {"node-1": 4}, {"node-2": 4}),
        (f"{DISJOINT} placement.trainer_strategy=strict_pack", {"node-1": 4}, {"node-2": 4}),
        ('placement.rollout_labels={zone="b"}', {"node-1": 4}, {"node-4": 4}),
        ('placement.trainer_labels={zone="!in(a,c)"}', {"node-4": 4}, {"node-1": 4}),
    ],
)
def test_strategies_labels_and_disjoint_nodes_say_where(sets, trainer, rollout):
    zones = ("", "a", "a", "a", "b")
    cluster = replace(
        FIVE,
        nodes=tuple(
            replace(node, labels={"zone": zone}) for node, zone in zip(FIVE.nodes, zones, strict=True)
        ),
    )
    assert where(job(cluster, COUNTS, sets), cluster) == {"trainer": trainer, "rollout": rollout}


@pytest.mark.parametrize(
    ("cluster", "sets", "bundle"),
    [
        (nodes((16, 4), (16, 4), (16, 4)), NODES, "bundle 1 of 1 of the trainer (8 GPUs and 8 CPUs)"),
        (nodes((16, 8), (16, 8)), NODES, "bundle 2 of 2 of the rollout (8 GPUs and 8 CPUs)"),
        (TWO, f"{DISJOINT} placement.ratio=3:1", "bundle 1 of 4 of the rollout (1 GPU and 1 CPU)"),
        (TWO, "placement.trainer_strategy=strict_pack placement.ratio=3:1", "bundle 1 of 12"),
        (TWO, f"placement.rollout_strategy=strict_spread {COUNTS}", "bundle 3 of 4 of the rollout"),
        (nodes((64, 8)), 'placement.trainer_labels={zone="b"}', "bundle 1 of 4 of the trainer"),
        (
            nodes((64, 3), (64, 3), (64, 2)),
            "placement.gpus_per_rollout_worker=4",
            "bundle 1 of 1 of the rollout (4 GPUs",
        ),
        (nodes((64, 32)), f"{NODES} {DISJOINT}", "bundle 1 of 2 of the rollout (8 GPUs and 8 CPUs)"),
        (nodes((64, 8)), f'{DISJOINT} placement.trainer_labels={{zone="b"}}', "bundle 1 of 4 of the trainer"),
    ],
)
def test_what_finds_no_node_is_told_with_all_nodes_and_a_hint_that_fits(cluster, sets, bundle):
    with pytest.raises(PreflightError) as refused:
        job(cluster, sets)
    assert bundle in refused.value.message
    for node in cluster.nodes:
        assert (
            f"\n  {node.name}: free {node.gpus} of {node.gpus} GPUs, {node.cpus} of {node.cpus} CPUs"
        ) in refused.value.message
    hinted = re.findall(r"--set (\S+)", refused.value.hint)
    changed = {key.partition("=")[0]: key for key in (*sets.split(), *hinted)}
    job(cluster, *changed.values())


def test_an_autoscaler_may_bring_what_is_missing():
    more = "placement.autoscaler=true placement.gpus=24 placement.device=cuda"
    assert job(nodes((16, 0)), NODES, more).gpus == 24


def test_selectors_are_rays():
    spot = {"market": "spot", "zone": "a"}
    for selector, fits in (
        ({}, True),
        ({"zone": "a"}, True),
        ({"zone": "!a"}, False),
        ({"zone": "in(a,b)"}, True),
    ):
        assert matches(spot, selector) == fits
    assert matches(spot, {"zone": "!in(b, c)", "market": "spot"})
    assert not matches(spot, {"gpu": "H100"})
    assert matches(spot, {"gpu": "!H100"})
