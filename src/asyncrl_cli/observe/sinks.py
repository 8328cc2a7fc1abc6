"""What a run's figures can be written to, and the table of those that a profile can name.

`Observers` gives every sink the same four things: a line of metrics per train step, events, where the
executors' time went, and a status per second. A package adds a sink as an entry point of `asyncrl.sinks`, and
a profile names it in `logging.sinks`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncrl_cli.base.plugins import find
from asyncrl_cli.contracts.status import Status
from asyncrl_cli.observe.line_types import Line
from asyncrl_cli.profile.schema import Profile

SINKS = {
    "wandb": "asyncrl_cli.observe.wandb_sink:Wandb",
    "tensorboard": "asyncrl_cli.observe.service_sinks:TensorBoard",
    "mlflow": "asyncrl_cli.observe.service_sinks:Mlflow",
    "prometheus": "asyncrl_cli.observe.prometheus_sink:Prometheus",
}
"""Those that keys of their own in `[logging]` switch on."""


class Sink:
    """Writes or shows what `Observers` computes. A subclass overrides the methods it needs. They are called
    on the event loop and must return at once.

    One that a profile names is constructed with the profile and the run's directory, when the run starts. It
    may raise PreflightError.
    """

    @classmethod
    def check(cls, profile: Profile) -> None:
        """Raises PreflightError, before anything is started, if the sink could not start."""

    def line(self, line: Line) -> None:
        """The metrics of a train step."""

    def event(self, event: Line) -> None:
        """One event, as it stands in events.jsonl."""

    def spans(self, spans: Line) -> None:
        """Where the executors' time went since the last train step, as it stands in timeline.jsonl."""

    def status(self, status: Status) -> None:
        """The run at a glance, once a second."""

    def end(self, status: Status) -> None:
        """The run has ended with this status. All sinks get this call before any is closed."""

    def close(self, status: Status) -> None:
        """Finish. The only call that may take time."""


def check_sinks(profile: Profile) -> None:
    """Raises PreflightError, before anything is started, for a sink that could not start (no login, no
    package, no free port), ConfigError for an unknown one."""
    for name in _wanted(profile):
        _kind(name).check(profile)


def make_sinks(profile: Profile, run_dir: Path) -> list[Sink]:
    """Start the sinks. Raises PreflightError if one does not start."""
    return [_kind(name)(profile, run_dir) for name in _wanted(profile)]


def _wanted(profile: Profile) -> list[str]:
    logging = profile.logging
    switched_on = {
        "wandb": logging.wandb != "disabled",
        "tensorboard": logging.tensorboard,
        "mlflow": bool(logging.mlflow_uri),
        "prometheus": logging.prometheus_port is not None,
    }
    return list(dict.fromkeys([name for name, is_on in switched_on.items() if is_on] + [*logging.sinks]))


def _kind(name: str) -> Any:
    return find("logging.sinks", name, SINKS, "asyncrl.sinks")
