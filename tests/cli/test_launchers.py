"""`asyncrl init` for clusters: what is rendered from a profile, by the words of each scheduler; Ray's own
schema judges its own."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import ray.autoscaler
import yaml
from jsonschema import validate

from asyncrl_cli.cli.app import run
from asyncrl_cli.job.ray.local_ray import STORED_RETURNS
from asyncrl_cli.plan.cluster import ClusterResources, NodeResources
from asyncrl_cli.plan.compiler import compile_job
from asyncrl_cli.profile.loaded import load

SIXTEEN = (
    "trainer.nnodes=2 trainer.n_gpus_per_node=8 rollout.nnodes=4 rollout.n_gpus_per_node=8 "
    "placement.disjoint_nodes=true"
)
IMAGE = ("--image", "registry.example/asyncrl:1")


def made(template: str, directory: Path, sets: str = SIXTEEN, *options: str) -> Path:
    words = ["--profile", "partial-rollout", "--shared", "/shared/task", *options]
    words += [word for text in sets.split() for word in ("--set", text)]
    assert run(["init", template, str(directory / template), *words]) == 0
    return directory / template


def documents(directory: Path) -> Any:
    (file,) = directory.glob("*.yaml")
    return yaml.safe_load(file.read_text())


@pytest.mark.parametrize("template", ["kuberay", "ray-cluster", "skypilot", "slurm"])
def test_nothing_is_left_to_fill_in_and_no_cluster_sends_arrays_through_the_driver(template, tmp_path):
    options = IMAGE if template in ("kuberay", "skypilot") else ()
    (variable,) = STORED_RETURNS.items()
    for path in made(template, tmp_path, SIXTEEN, *options).iterdir():
        text = path.read_text()
        assert "{{" not in text
        assert "/shared/task/runs" in text or path.name == "cluster.yaml"
        starts = [part for part in text.split("ulimit")[1:] if "ray start" in part] or [text]
        if path.name != "README.md" and template != "kuberay":  # its pods have it in their specifications
            assert all("=".join(variable) in start for start in starts), starts


def test_slurm_has_the_profiles_nodes_and_a_script_without_mistakes(tmp_path):
    script = made("slurm", tmp_path) / "train.sbatch"
    text = script.read_text()
    assert {"#SBATCH --nodes=6", "#SBATCH --gpus-per-node=8", "#SBATCH --requeue"} <= set(text.splitlines())
    assert "--name partial-rollout --runs-dir /shared/task/runs --resume auto" in text
    if shellcheck := shutil.which("shellcheck"):
        subprocess.run([shellcheck, script], check=True)
    subprocess.run(["bash", "-n", script], check=True)


def test_a_job_is_planned_without_this_shells_settings_and_says_what_is_odd(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ASYNCRL_TRAINER__NNODES", "4")
    text = (made("slurm", tmp_path, f"{SIXTEEN} run.stall_timeout_s=600.0") / "train.sbatch").read_text()
    assert "#SBATCH --nodes=6" in text
    assert "rollout.call_timeout_s = 600" in capsys.readouterr().err


def test_rays_schema_takes_the_cluster(tmp_path):
    cluster = documents(made("ray-cluster", tmp_path))
    validate(cluster, json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text()))
    assert (len(cluster["provider"]["worker_ips"]), cluster["max_workers"]) == (5, 5)


def test_skypilots_task_has_the_entrypoint_on_its_first_node(tmp_path):
    task = documents(made("skypilot", tmp_path, SIXTEEN, *IMAGE))
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (6, "H100:8")
    assert "asyncrl train --profile partial-rollout --set trainer.nnodes=2" in task["run"]


@pytest.mark.parametrize(
    ("sets", "trainer", "rollout"),
    [
        (SIXTEEN, (2, 8), (4, 8)),
        ("placement.gpus=8 placement.ratio=1:3", (1, 2), (1, 6)),
        (
            "placement.trainer_workers=12 rollout.workers=5 placement.gpus_per_rollout_worker=2",
            (2, 6),
            (2, 6),
        ),
        (
            "placement.trainer_workers=4 placement.trainer_strategy=strict_spread rollout.workers=3",
            (4, 1),
            (1, 3),
        ),
        (
            "placement.colocate=true placement.gpus=16 async_training.staleness_threshold=0 "
            "async_training.partial_rollout=false",
            (2, 8),
            (0, 0),
        ),
    ],
)
def test_kuberays_pods_hold_the_job(sets, trainer, rollout, tmp_path):
    cluster = documents(made("kuberay", tmp_path, sets, *IMAGE))["spec"]["rayClusterSpec"]
    head, groups = cluster["headGroupSpec"], cluster["workerGroupSpecs"]
    limits = {
        group["groupName"]: group["template"]["spec"]["containers"][0]["resources"]["limits"]
        for group in groups
    }
    pods = {
        group["groupName"]: (group["replicas"], limits[group["groupName"]]["nvidia.com/gpu"])
        for group in groups
    }
    assert pods == {"trainer": trainer, "rollout": rollout}
    nodes = [
        NodeResources(
            name=f"{role}-{index}",
            cpus=limits[role]["cpu"],
            gpus=gpus,
            labels=groups[role == "rollout"]["labels"],
        )
        for role, (number, gpus) in pods.items()
        for index in range(number)
    ]
    variables = {entry["name"]: entry["value"] for entry in head["template"]["spec"]["containers"][0]["env"]}
    stored = [{"name": name, "value": value} for name, value in STORED_RETURNS.items()]
    assert all(group["template"]["spec"]["containers"][0]["env"] == stored for group in groups)
    assert variables.items() >= STORED_RETURNS.items()
    # and not its autoscaler's patience
    there = {name: variables[name] for name in variables if name.endswith("LABELS")}
    compile_job(
        load("partial-rollout", sets.split(), environ=there).profile, ClusterResources(nodes=tuple(nodes))
    )


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        ("slurm D", 2, "--profile NAME|FILE"),
        (
            "slurm D --profile partial-rollout --nodes 1 --gpus-per-node 4 --set placement.gpus=8",
            3,
            "has 4 GPUs",
        ),
        ("slurm D --profile partial-rollout --set placement.device=cpu", 2, "placement.gpu_bundles=true"),
        ("slurm D --profile partial-rollout --image a", 2, "--image is not used"),
        ("slurm D --profile partial-rollout --name My_Run", 2, "--name my-run"),
        ("kuberay D --profile partial-rollout", 2, "--image REGISTRY/NAME:TAG"),
        ("kuberay D --profile partial-rollout --image a --nodes 2", 2, "--nodes is not used"),
        (
            'kuberay D --profile partial-rollout --image a --set placement.trainer_labels={a="b"}',
            2,
            "leave them out",
        ),
        ("jsonl D --nodes 2", 2, "kuberay, ray-cluster, skypilot, slurm"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments, code, told, tmp_path, capsys):
    assert run(["init", *arguments.replace("D", str(tmp_path / "launch"), 1).split()]) == code
    assert told in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "launch").exists()
