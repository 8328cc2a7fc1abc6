"""Whole runs at servers that are not the run's own: `asyncrl serve` in processes of their own."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator

import pytest

from asyncrl_cli.cli.app import run as asyncrl
from tests.engines.remote.server_world import Served, serving
from tests.run.commands import (
    LONG,
    SMALL,
    Finished,
    finish,
    kill,
    lines,
    start,
    wait_for_steps,
    wait_until,
)

pytestmark = pytest.mark.slow
MODEL, FLOAT = "builtin:tiny", "model.dtype=float32"
WORDS = ("--profile", "partial-rollout", "--name", "far", "--ui", "plain")

CLAIMS = ("groups", "trained once", "ledger", "windows", "staleness bound", "loaded first", "advantages")
"""Of the audit, from the run's files alone. (Idle times differ where everything waits for cores.)"""


def remote_sets(tmp_path, *servers) -> tuple[str, ...]:
    urls = json.dumps([server.url for server in servers])
    return (
        *("rollout.engine=remote", f"rollout.urls={urls}", FLOAT),
        f"rollout.token_file={servers[0].token_file}",
        *("weights.transport=directory", f"weights.url=file://{tmp_path}/versions"),
    )


@pytest.fixture(scope="module")
def first(tmp_path_factory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("servers") / "serve.token", MODEL, *SMALL, FLOAT) as server:
        yield server


def test_a_run_outlives_the_kill_of_one_of_two_servers_and_trains_every_group_once(
    tmp_path, first, monkeypatch, capsys
):
    key, run = first.token_file, tmp_path / "runs" / "far"

    def back() -> list[dict]:
        """The versions that the second server's worker has loaded since it came back."""
        events = lines(run / "events.jsonl")
        ends = [i for i, event in enumerate(events) if event["event"] == "restarted"]
        later = events[ends[0] :] if ends else []
        return [one for one in later if (one["event"], one.get("worker")) == ("loaded", "rollout-1")]

    with serving(key, MODEL, *SMALL, FLOAT) as second:
        sets = (*LONG, *remote_sets(tmp_path, first, second), "rollout.max_restarts=2")
        process = start(tmp_path, "train", *WORDS, sets=sets)
        wait_for_steps(process, run, 5)
        second.end()
        wait_for_steps(process, run, 8)
        second.start()
        wait_until(process, back, "the second server's worker has loaded")
        wait_for_steps(process, run, len(lines(run / "metrics.jsonl")) + 6)
        kill(process, signal.SIGINT)
        code, out, err = finish(process)
    assert code == 130, err
    ran = Finished.of(run)
    (lost,) = ran.named("lost")
    assert (lost["worker"], second.url in lost["error"]) == ("rollout-1", True)
    assert back()[0]["version"] == ran.named("restarted")[0]["version"], "the newest comes first"
    assert max(event["logprob_abs_diff"] for event in ran.named("loaded")) < 1e-4
    assert ran.steps[-1]["ledger/trained"] == 4 * len(ran.steps)
    assert ran.steps[-1]["ledger/dropped"] == 0
    monkeypatch.chdir(tmp_path)
    asyncrl(["audit", "far", "--json"])
    claims = json.loads(capsys.readouterr().out)["claims"]
    verdicts = {claim["name"]: claim["verdict"] for claim in claims}
    assert {verdicts[claim] for claim in CLAIMS} == {"holds"}, verdicts
    token = key.read_text().strip()
    texts = [out, err, *(path.read_text(errors="replace") for path in run.rglob("*") if path.is_file())]
    assert not [text for text in texts if token in text]


def test_what_a_server_lacks_is_one_error_before_anything_is_started(tmp_path, first, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sets = [word for setting in (*SMALL, *remote_sets(tmp_path, first)) for word in ("--set", setting)]

    def train(*words: str) -> tuple[int, str, str]:
        code, printed = asyncrl(["train", *WORDS, *sets, *words]), capsys.readouterr()
        return code, " ".join(printed.out.split()), " ".join(printed.err.split())

    code, out, err = train("--dry-run")
    assert (code, f"rollout-0 generates at {first.url}" in out) == (0, True), err
    code, _, err = train("--set", "rollout.slots=17")
    assert (code, err.count("error:")) == (3, 1)
    assert f"error: server {first.url}: rollout.slots is 16 there, and 17 here" in err
    assert "hint: start the server with --set rollout.slots=17, or --set rollout.slots=16 here" in err
    first.end()
    code, _, err = train()
    unreached = f"error: server {first.url}: cannot be reached: connection refused"
    assert (code, unreached in err) == (3, True), err
    assert not (tmp_path / "runs" / "far").exists()
