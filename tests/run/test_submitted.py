"""Runs as jobs of a cluster that asks for its user's token: everything about them is asked from another
directory, by the cluster's address."""

from __future__ import annotations

import json
import secrets
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from asyncrl_cli.checkpoint.run_directory import RunDirectory
from asyncrl_cli.job.submit.job_client import BoundedClient
from tests.run.commands import ENDLESS, LIMIT_S, SOON_S, finish, lines, start
from tests.run.heads import Head, plain_head
from tests.run.test_ends import trained_that_count
from tests.statuses import write_status

pytestmark = pytest.mark.slow

REWARDS = """
import time

from helpers import length

def score(item, response):
    time.sleep(0.03)  # as in rewards/paced.py
    return float(length(response) % 2)
"""
SETS = (
    *ENDLESS,
    "task.reward=rewards:score",
    "task.rehearsal_items=0",
    'run.ship=["helpers.py"]',
    "algorithm.adv_estimator=gae",
    'placement.tasks=[["train"],["critic"],["rollout"]]',
    "placement.ratios=[1,1,1]",
    "algorithm.overlong_buffer_tokens=47",  # whatever the task's rewards are, there is something to learn
    "async_training.trigger_parameter_sync_step=1",
    "async_training.staleness_threshold=1",
)
"""The critic has a process of its own."""
BETA = 0.99
"""`trainer.betas`, the second of them."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Head]:
    with plain_head() as head:
        yield head


def asked(
    directory: Path, cluster: Head, command: str, *words: str, sets: tuple[str, ...] = ()
) -> tuple[int, str, str]:
    directory.mkdir(exist_ok=True)
    return finish(start(directory, command, *words, "--address", cluster.dashboard, sets=sets, verbose=False))


def test_commands_are_run_where_the_files_are(tmp_path, cluster):
    """On a run that this process holds; and a job that fails at once is told with its own error and exit
    code."""
    runs = ("--runs-dir", str(tmp_path / "runs"))
    directory = RunDirectory.create(tmp_path / "runs", "held", profile_toml="", resolved={})
    (directory.start_attempt() / "driver.log").write_text("one\ntwo\n", encoding="utf-8")
    write_status(directory.path, phase="running")
    watching = start(tmp_path, "watch", "held", *runs, "--address", cluster.dashboard, verbose=False)
    assert watching.stdout is not None
    assert watching.stdout.readline().endswith("(partial-rollout): running\n")
    assert asked(tmp_path / "elsewhere", cluster, "logs", "held", *runs)[:2] == (0, "one\ntwo\n")
    code, _, _ = asked(tmp_path / "elsewhere", cluster, "stop", "held", *runs)
    assert (code, directory.stop_requests()) == (0, 1)
    assert watching.poll() is None
    watching.send_signal(signal.SIGINT)
    code, _, err = finish(watching)
    directory.close()
    assert code == 0, err
    assert "run 'held' continues" in err

    words = ("--profile", "partial-rollout", *runs)
    code, _, err = asked(
        tmp_path / "elsewhere", cluster, "submit", *words, sets=("task.source=jsonl:/nothing.jsonl",)
    )
    assert code == 2, err
    assert "/nothing.jsonl" in err
    assert "Running entrypoint" not in err


def test_a_submitted_run_with_stale_samples_is_stopped_by_ray_and_resumed_with_what_its_critic_has_learned(
    tmp_path, cluster
):
    run, here = tmp_path / "runs" / "sent", tmp_path / "here"
    here.mkdir()
    (here / "rewards.py").write_text(REWARDS)
    (here / "helpers.py").write_text("length = len\n")
    words = ("--profile", "stale-samples", "--name", "sent", "--runs-dir", str(run.parent), "--json")
    code, out, err = asked(here, cluster, "submit", *words, sets=SETS)
    assert code == 0, err
    for path in here.iterdir():
        path.unlink()  # the job has its own
    wait_for_step(run, 2)
    assert (run / "logs" / "latest" / "critic-0.log").exists()
    client, job = BoundedClient(cluster.dashboard), json.loads(out)["job"]
    client.stop_job(job)  # SIGTERM, and by default SIGKILL after 3 s
    first = wait_for_end(run)
    steps, moments = critic_at(run)

    code, _, err = asked(tmp_path / "elsewhere", cluster, "resume", "sent")
    assert code == 0, err
    wait_for_step(run, first + 1)
    assert finish(start(run.parent, "stop", "sent", "--runs-dir", "."))[0] == 0  # the directory is shared
    last = wait_for_end(run)
    assert exit_code_of_newest(client) == 130
    assert [job["run"] for job in json.loads(asked(tmp_path, cluster, "status", "--json")[1])][:2] == [
        "sent",
        "sent",
    ]
    trained = trained_that_count(lines(run / "events.jsonl"))
    assert set(Counter(event["step"] for event in trained).values()) == {4}
    assert len(trained) == len({(event["uid"], event["epoch"]) for event in trained}) == 4 * last
    metrics = lines(run / "metrics.jsonl")
    assert [step["step"] for step in metrics] == list(range(1, last + 1))
    assert [step["ledger/trained"] for step in metrics] == [4 * step["step"] for step in metrics]
    assert max(step["fully_async/partial/max_partial_span"] for step in metrics) == 0
    assert max(step["staleness/max"] for step in metrics) <= 1
    steps_then, moments_then = critic_at(run)
    assert (steps, steps_then) == (first, last)
    assert any(bool(moment.any()) for moment in moments.values())
    for name, moment in moments.items():
        assert bool((moments_then[name] >= BETA ** (last - first) * moment * (1 - 1e-4)).all()), name


def exit_code_of_newest(client: BoundedClient) -> int:
    """Of the job that was submitted last, once it has ended."""
    until_s = time.monotonic() + SOON_S
    while (job := max(client.list_jobs(), key=lambda job: job.start_time)).driver_exit_code is None:
        assert time.monotonic() < until_s, job
        time.sleep(0.1)
    return int(job.driver_exit_code)


def critic_at(run: Path) -> tuple[int, dict[str, Tensor]]:
    """In the newest checkpoint: its optimizer steps, and the second moments of its gradients. AdamW makes
    these smaller by `BETA` in a step, and no faster: a critic that begins anew has smaller ones."""
    directory = run / "checkpoints" / "latest"
    steps = json.loads((directory / "critic.json").read_text())["critic_steps"]
    tensors = load_file(directory / "critic-00000.safetensors")
    return steps, {name: tensor for name, tensor in tensors.items() if name.startswith("exp_avg_sq/")}


def wait_for_step(run: Path, step: int) -> None:
    until_s = time.monotonic() + LIMIT_S
    while len(lines(run / "metrics.jsonl")) < step:
        assert time.monotonic() < until_s, list(run.glob("logs/latest/*"))
        time.sleep(0.1)


def wait_for_end(run: Path) -> int:
    """Wait until the driver has stopped the run in order. Returns the step of its newest checkpoint, which is
    its last one."""
    until_s = time.monotonic() + LIMIT_S
    while json.loads((run / "status.json").read_text())["phase"] != "stopped":
        assert time.monotonic() < until_s
        time.sleep(0.1)
    steps = len(lines(run / "metrics.jsonl"))
    assert (run / "checkpoints" / f"step-{steps:06d}" / "manifest.json").exists()
    return steps


def test_a_cluster_is_found_by_ray_address_and_refuses_whoever_lacks_its_token(tmp_path, cluster):
    plan = ("plan", "--profile", "partial-rollout", "--address", cluster.address)
    train = {"RAY_ADDRESS": cluster.address, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    code, _, err = finish(start(tmp_path, "train", "--profile", "partial-rollout", verbose=False, **train))
    assert (code, "token" in err, "hint:" in err) == (3, True, True), err
    for another in (
        {"RAY_AUTH_TOKEN": secrets.token_hex(32)},
        {"HOME": str(tmp_path)},
        {"RAY_AUTH_MODE": "disabled"},
    ):
        for command in (("status", "--address", cluster.dashboard), plan):
            code, _, err = finish(start(tmp_path, *command, verbose=False, **another))
            assert (code, "token" in err, "hint:" in err) == (3, True, True), err


def test_a_head_that_asks_for_no_token_gets_none(tmp_path):
    with plain_head(RAY_AUTH_MODE="disabled") as head:
        code, _, err = finish(start(tmp_path, "status", "--address", head.dashboard, verbose=False))
        assert (code, "no run was submitted" in err) == (0, True), err
        plan = ("plan", "--profile", "partial-rollout", "--address", head.address)
        code, _, err = finish(start(tmp_path, *plan, verbose=False))
        assert code == 0, err
