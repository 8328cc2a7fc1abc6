"""Prometheus, TensorBoard and MLflow, each read back by its own means."""

from __future__ import annotations

import json
import re
import struct
import threading
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace

import pytest

from asyncrl_cli.base.errors import PreflightError
from asyncrl_cli.contracts.events import Event
from asyncrl_cli.observe import service_sinks
from asyncrl_cli.observe.observers import Observers
from asyncrl_cli.observe.prometheus_sink import Prometheus
from asyncrl_cli.observe.service_sinks import Background, Mlflow, TensorBoard, tags_of
from asyncrl_cli.observe.sinks import check_sinks
from asyncrl_cli.profile.keys import entries_of
from asyncrl_cli.profile.loaded import load
from asyncrl_cli.profile.toml_files import shipped_templates

LINES = [
    {
        "step": step,
        "time_s": float(step),
        "reward/mean": step / 10,
        "reward/best@2/mean": 0.5,
        "staleness/histogram": [3, 1],
    }
    for step in (1, 2, 3)
]
BASE = load("base", environ={}).profile


def test_prometheus_scrapes_the_loops_gauges_from_loopback(facts, make):
    from prometheus_client.parser import text_string_to_metric_families

    sink = Prometheus(BASE, Path("brave-otter"))
    port = sink.port
    observers = Observers(facts, [sink], clock=lambda: 118.0)
    observers.step(made := make["full_record"](118))
    observers.tick(make["full_overview"](made))
    asking = HTTPConnection("127.0.0.1", port, timeout=60)
    asking.request("GET", "/metrics")
    families = list(text_string_to_metric_families(asking.getresponse().read().decode()))
    asking.close()
    samples = {
        (sample.name, frozenset(sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
    }
    assert samples["asyncrl_step", frozenset({"brave-otter"})] == 118
    assert samples["asyncrl_staleness_bound", frozenset({"brave-otter"})] == 1
    assert samples["asyncrl_trainer_idle_ratio", frozenset({"brave-otter"})] == pytest.approx(0.4)
    assert samples["asyncrl_slots", frozenset({"brave-otter"})] == 128
    assert samples["asyncrl_executor_state", frozenset({"brave-otter", "trainer", "starved"})] == 1
    assert samples["asyncrl_worker_version", frozenset({"brave-otter", "rollout-1"})] == 117
    assert samples["asyncrl_groups", frozenset({"brave-otter", "trained"})] == 16 * 118
    taken = load("base", [f"logging.prometheus_port={port}"], environ={}).profile
    with pytest.raises(
        PreflightError,
        match=f"logging.prometheus_port = {port} cannot be listened on: address already in use",
    ):
        check_sinks(taken)
    observers.close("done")
    check_sinks(taken)


def test_the_dashboard_asks_for_gauges_that_there_are(facts, make):
    sink = Prometheus(BASE, Path("brave-otter"))
    observers = Observers(facts, [sink], clock=lambda: 118.0)
    for step in (117, 118):
        observers.step(made := make["full_record"](step))
    observers.event(
        Event(time_s=1.0, name="eval", version=1, step=1, fields={"reward_mean": 0.5, "num_prompts": 9})
    )
    observers.tick(make["full_overview"](made))
    known = {family.name for family in sink.collect()}
    observers.close("done")
    panels = json.loads((shipped_templates()["grafana"] / "dashboard.json").read_text())["panels"]
    asked = {
        name
        for panel in panels
        for target in panel["targets"]
        for name in re.findall(r"asyncrl_\w+", target["expr"])
    }
    assert asked <= known
    assert len(asked) > 15


def test_tags_name_what_runs_are_filtered_by():
    profile = load("one-step-off", ["model.path=Qwen/Qwen3-0.6B"], environ={}).profile
    assert list(tags_of(profile).values()) == ["one-step-off", "one-step-off", "transformers", "Qwen3-0.6B"]


@pytest.mark.parametrize(
    ("key", "extra"), [("tensorboard=true", "tensorboard"), ("mlflow_uri=http://x:1", "mlflow")]
)
def test_a_sink_whose_package_is_missing_is_refused_before_the_run(monkeypatch, key, extra):
    monkeypatch.setattr(service_sinks, "find_spec", lambda name: None)
    with pytest.raises(PreflightError, match="it is not installed") as refused:
        check_sinks(load("base", [f"logging.{key}"], environ={}).profile)
    assert f"pip install 'asyncrl-cli[{extra}]'" in refused.value.hint


def test_slow_services_finish_at_the_same_time(facts, tmp_path):
    together = threading.Barrier(2, timeout=30)
    met = []

    class Slow(Background):
        service = package = otherwise = "slow"

        def open(self):
            pass

        def write(self, line):
            pass

        def finish(self, status):
            met.append(together.wait())

    Observers(facts, [Slow(BASE, tmp_path), Slow(BASE, tmp_path)], clock=lambda: 0.0).close("done")
    assert sorted(met) == [0, 1]


@pytest.mark.slow
def test_tensorboard_reads_what_was_written_before_and_after_a_resume(tmp_path, done):
    pytest.importorskip("tensorboard")
    from tensorboard.compat.proto.event_pb2 import Event

    for lines in (LINES[:2], LINES[2:]):
        sink = TensorBoard(BASE, tmp_path)
        for line in lines:
            sink.line(line)
        sink.end(done)
        sink.close(done)
    written = {}
    for path in sorted((tmp_path / "tensorboard").iterdir()):
        content, at = path.read_bytes(), 0
        while at < len(content):  # a TFRecord: length, checksum, data, checksum
            (length,) = struct.unpack_from("<Q", content, at)
            event = Event.FromString(content[at + 12 : at + 12 + length])
            written |= {(value.tag, event.step): value.tensor.float_val[0] for value in event.summary.value}
            at += 16 + length
    rewards = {step: value for (tag, step), value in written.items() if tag == "reward/mean"}
    assert rewards == pytest.approx({1: 0.1, 2: 0.2, 3: 0.3})
    assert not any(tag in ("step", "staleness/histogram") for tag, _ in written)


def test_mlflow_gets_parameters_once_and_a_resumed_run_goes_on(tmp_path, done, monkeypatch):
    """Against a stand-in for its client: the store of the smallest MLflow is a server."""

    monkeypatch.setattr(service_sinks, "EARLY_CLOSE_TIMEOUT_S", service_sinks.CLOSE_TIMEOUT_S)
    said = []

    class Client:
        def __init__(self, tracking_uri: str) -> None:
            said.append(tracking_uri)

        def get_experiment_by_name(self, name):
            return SimpleNamespace(experiment_id="7")

        def create_run(self, experiment_id, tags):
            said.append((experiment_id, tags))
            return SimpleNamespace(info=SimpleNamespace(run_id="abc"))

        def log_batch(self, run_id, metrics=(), params=()):
            said.append((run_id, [tuple(one) for one in (*metrics, *params)]))

        def update_run(self, run_id, status):
            said.append((run_id, status))

        def set_terminated(self, run_id, status):
            said.append((run_id, status))

    modules = {
        "mlflow": SimpleNamespace(MlflowClient=Client),
        "mlflow.entities": SimpleNamespace(
            Param=lambda *of: of, Metric=lambda key, value, time_ms, step: (key, value, step)
        ),
    }
    for name, module in modules.items():
        monkeypatch.setitem(__import__("sys").modules, name, module)
    settings = ["logging.mlflow_uri=u", "logging.wandb_project=p"]
    profile = load("base", settings, environ={}).profile
    for line, phase in ((LINES[0], "stopped"), (LINES[1], "done")):
        sink = Mlflow(profile, tmp_path)
        sink.line(line)
        sink.end(replace(done, phase=phase))
        sink.close(replace(done, phase=phase))

    def figures(step):
        return [("step", step, step), ("time_s", float(step), step), ("reward/mean", step / 10, step)]

    best, params = "reward/best_at_2/mean", [(key, str(value)) for key, value in entries_of(profile).items()]
    assert said == [
        "u",
        ("7", {**tags_of(profile), "mlflow.runName": tmp_path.name}),
        *(("abc", params[start : start + 100]) for start in range(0, len(params), 100)),
        ("abc", [*figures(1), (best, 0.5, 1)]),
        ("abc", "KILLED"),
        "u",
        ("abc", "RUNNING"),
        ("abc", [*figures(2), (best, 0.5, 2)]),
        ("abc", "FINISHED"),
    ]
