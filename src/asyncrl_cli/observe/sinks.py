"""The sinks that a profile's `[logging]` asks for, beside the run's own files and its screen. TensorBoard and
MLflow are here."""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from asyncrl_cli.base.errors import PreflightError
from asyncrl_cli.base.storage import replace_text
from asyncrl_cli.observe.background import Background
from asyncrl_cli.observe.format import is_number
from asyncrl_cli.observe.observers import Sink
from asyncrl_cli.observe.prometheus_sink import Prometheus, check_port
from asyncrl_cli.observe.wandb_sink import Wandb, check_login
from asyncrl_cli.profile.arithmetic import mode_of
from asyncrl_cli.profile.keys import entries_of
from asyncrl_cli.profile.schema import Profile

MLFLOW_ENDS = {"done": "FINISHED", "stopped": "KILLED"}
MLFLOW_AT_ONCE = 100
"""Parameters that MLflow takes in one request. It takes 1,000 metrics, which is more than a step has."""


def check_sinks(profile: Profile) -> None:
    """Raises PreflightError, before anything is started, for a sink that could not start: no login, no
    package, no free port."""
    logging = profile.logging
    if logging.wandb == "online":
        check_login()
    for wanted, module, kind in (
        (logging.tensorboard, "tensorboard", TensorBoard),
        (logging.mlflow_uri, "mlflow", Mlflow),
    ):
        if wanted and find_spec(module) is None:
            raise PreflightError(f"{kind.service} did not start: it is not installed", hint=kind.otherwise)
    if logging.prometheus_port is not None:
        check_port(logging.prometheus_port)


def make_sinks(profile: Profile, run_dir: Path) -> list[Sink]:
    """Start the sinks. Raises PreflightError if one does not start."""
    logging, name, sinks = profile.logging, run_dir.name, list[Sink]()
    tags = tags_of(profile)
    if logging.wandb != "disabled":
        whole = {"config": profile.model_dump(mode="json"), "tags": list(tags.values())}
        sinks.append(Wandb(run_dir, mode=logging.wandb, project=logging.wandb_project, name=name, **whole))
    if logging.tensorboard:
        sinks.append(TensorBoard(run_dir))
    if logging.mlflow_uri:
        flat: dict[str, Any] = entries_of(profile)
        sinks.append(
            Mlflow(
                run_dir,
                uri=logging.mlflow_uri,
                project=logging.wandb_project,
                name=name,
                config=flat,
                tags=tags,
            )
        )
    if logging.prometheus_port is not None:
        sinks.append(Prometheus(logging.prometheus_port, name))
    return sinks


def tags_of(profile: Profile) -> dict[str, str]:
    """Tags to filter runs by; at most 64 characters each, as W&B requires."""
    model = profile.model.path.rstrip("/").rpartition("/")[2]
    tags = {
        "profile": profile.name,
        "mode": mode_of(profile),
        "engine": profile.rollout.engine,
        "model": model,
    }
    return {key: value[:64] for key, value in tags.items()}


class TensorBoard(Background):
    """Every number of a line of metrics.jsonl under the same name, in `run_dir/tensorboard`. A resumed run
    continues in the same directory; TensorBoard itself drops the earlier values of steps that were trained
    again."""

    service, otherwise = (
        "TensorBoard",
        ("pip install 'asyncrl-cli[tensorboard]', or --set logging.tensorboard=false"),
    )

    def __init__(self, run_dir: Path) -> None:
        self._directory = str(run_dir / "tensorboard")
        super().__init__()

    def open(self) -> None:
        from tensorboard.summary import Writer

        self._writer = Writer(self._directory)

    def write(self, line: Mapping[str, Any]) -> None:
        for key, value in line.items():
            if is_number(value) and key != "step":
                self._writer.add_scalar(key, value, line["step"])
        self._writer.flush()

    def finish(self, status: Mapping[str, Any]) -> None:
        self._writer.close()


class Mlflow(Background):
    """The configuration as parameters, tags, and every number of a line of metrics.jsonl. `uri`: of the
    tracking server or store. A resumed run continues the same MLflow run, whose id is kept in its
    directory."""

    service, otherwise = "MLflow", "pip install 'asyncrl-cli[mlflow]', or leave out logging.mlflow_uri"

    def __init__(
        self,
        run_dir: Path,
        *,
        uri: str,
        project: str,
        name: str,
        config: Mapping[str, Any],
        tags: Mapping[str, str],
    ) -> None:
        self._uri, self._project, self._config, self._tags = (
            uri,
            project,
            config,
            {**tags, "mlflow.runName": name},
        )
        self._id_file = run_dir / "mlflow-run-id"
        super().__init__()

    def open(self) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient(tracking_uri=self._uri)
        if self._id_file.exists():
            self._run_id = self._id_file.read_text(encoding="utf-8")
            self._client.update_run(self._run_id, "RUNNING")
            return
        experiment = self._client.get_experiment_by_name(self._project)
        experiment_id = (
            experiment.experiment_id if experiment else self._client.create_experiment(self._project)
        )
        self._run_id = self._client.create_run(experiment_id, tags=self._tags).info.run_id
        replace_text(self._id_file, self._run_id)
        params = [Param(key, str(value)[:6000]) for key, value in self._config.items()]
        for start in range(0, len(params), MLFLOW_AT_ONCE):
            self._client.log_batch(self._run_id, params=params[start : start + MLFLOW_AT_ONCE])

    def write(self, line: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric

        now_ms, numbers = (
            int(time.time() * 1000),
            {key: value for key, value in line.items() if is_number(value)},
        )
        # MLflow takes no "@" in a name: best@8 is best_at_8.
        metrics = [
            Metric(key.replace("@", "_at_"), value, now_ms, line["step"]) for key, value in numbers.items()
        ]
        self._client.log_batch(self._run_id, metrics=metrics)

    def finish(self, status: Mapping[str, Any]) -> None:
        self._client.set_terminated(self._run_id, MLFLOW_ENDS.get(status["phase"], "FAILED"))
