"""The sink for Prometheus: the run's status as gauges, on a port of the loopback interface."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from asyncrl_cli.base.errors import PreflightError
from asyncrl_cli.base.safe_files import reason
from asyncrl_cli.contracts.status import Status
from asyncrl_cli.observe.format import by_set, is_number
from asyncrl_cli.observe.sinks import Sink
from asyncrl_cli.profile.schema import Profile

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily

L = TypeVar("L", bound=tuple[str, ...])
ADDRESS = "127.0.0.1"
FIGURES: Mapping[str, tuple[str, str]] = {
    "step": ("progress.step", "Train steps that have ended"),
    "train_steps": ("progress.train_steps", "Length of the run in train steps"),
    "version": ("progress.version", "Newest published weight version"),
    "groups_trained": ("progress.groups_trained", "Groups trained so far"),
    "time_seconds": ("progress.time_s", "Elapsed time of the run"),
    "left_seconds": ("progress.eta_s", "Estimated time to the end"),
    "reward_mean": ("reward.mean", "Mean reward of the last train step"),
    "trainer_idle_ratio": ("utilization.trainer_idle_ratio", "Share of time in which the trainer waited"),
    "rollouter_idle_ratio": (
        "utilization.rollouter_idle_ratio",
        "Share of time in which rollout workers had nothing to do",
    ),
    "slot_utilization": ("utilization.rollouter_slot_utilization", "Share of slots in use"),
    "overlap_ratio": ("utilization.overlap_ratio", "Share of the busy time in which both sides worked"),
    "rollouter_tokens_per_second": ("utilization.rollouter_tokens_per_s", "Sampled tokens per second"),
    "trainer_tokens_per_second": ("utilization.trainer_tokens_per_s", "Trained tokens per second"),
    "running_sequences": ("utilization.running_sequences", "Sequences being generated now"),
    "slots": ("utilization.slots", "Slots of all rollout workers"),
    "staleness_mean": ("staleness.mean", "Mean age of trained tokens in versions"),
    "staleness_max": ("staleness.max", "Largest age of a trained token in versions"),
    "staleness_bound": ("staleness.bound", "Bound on the age of a trained token"),
    "partial_ratio": ("partial.partial_ratio", "Share of trajectories sampled by several versions"),
    "window_taken": ("admission.window_taken", "Groups of the window that have been taken"),
    "window_budget": ("admission.window_budget", "Groups that may be admitted per window"),
    "sync_logprob_abs_diff": (
        "sync.logprob_abs_diff",
        "Mean absolute logprob difference of the last sync's probes",
    ),
    "sync_pause_seconds": ("sync.pause_s", "Pause of generation at the last load"),
}
"""Gauge, without its prefix -> section and key in status.json, and its help."""


class Prometheus(Sink):
    """Serves the newest status at http://127.0.0.1:port/metrics. Every gauge has the label `run`.

    Raises PreflightError if the port cannot be listened on.
    """

    @classmethod
    def check(cls, profile: Profile) -> None:
        with socket.socket() as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                trial.bind((ADDRESS, port_of(profile)))
            except OSError as error:
                raise _refusal(port_of(profile), error) from None

    def __init__(self, profile: Profile, run_dir: Path) -> None:
        from prometheus_client import CollectorRegistry, start_http_server

        self._run = run_dir.name
        self._status: Status | None = None
        registry, port = CollectorRegistry(), port_of(profile)
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, addr=ADDRESS, registry=registry)
        except OSError as error:
            raise _refusal(port, error) from None
        self.port = self._server.server_port

    def status(self, status: Status) -> None:
        self._status = status

    def close(self, status: Status) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Called by prometheus_client at each scrape, in a thread of its server."""
        if (status := self._status) is None:
            return
        document = status.to_json()
        for name, (place, text) in FIGURES.items():
            section, _, key = place.partition(".")
            if is_number(value := document[section].get(key)):
                yield self._gauge(name, text, {(): value})
        states = {(one.name, one.role, one.state): 1 for one in status.executors}
        text = "1 for the state that an executor is in"
        yield self._gauge("executor_state", text, states, "executor", "role", "state")
        versions = {(name,): version for name, version in status.versions.items()}
        yield self._gauge("worker_version", "Weight version that a rollout worker holds", versions, "worker")
        groups = {(account,): number for account, number in status.ledger.items()}
        yield self._gauge("groups", "Groups by where they are", groups, "account")
        rewards = {
            (name or "held-out",): points[-1]["reward_mean"]
            for name, points in by_set(status.eval.history).items()
        }
        known = {name: reward for name, reward in rewards.items() if is_number(reward)}
        yield self._gauge("eval_reward_mean", "Mean reward of the last eval", known, "eval_set")
        yield self._gauge("warnings", "Warnings so far", {(): status.num_warnings})

    def _gauge(self, name: str, text: str, values: Mapping[L, float], *labels: str) -> GaugeMetricFamily:
        from prometheus_client.core import GaugeMetricFamily

        family = GaugeMetricFamily(f"asyncrl_{name}", text, labels=["run", *labels])
        for labelled, value in values.items():
            family.add_metric([self._run, *labelled], value)
        return family


def port_of(profile: Profile) -> int:
    return profile.logging.prometheus_port or 0


def _refusal(port: int, error: OSError) -> PreflightError:
    why = f"logging.prometheus_port = {port} cannot be listened on: {reason(error)}"
    return PreflightError(why, hint="another run may have it: --set logging.prometheus_port=...")
