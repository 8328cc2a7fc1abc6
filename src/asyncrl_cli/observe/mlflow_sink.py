"""The sink for MLflow: the configuration as parameters, tags, and every number of a line of metrics.jsonl."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl_cli.observe.background import Background
from asyncrl_cli.observe.format import is_number
from asyncrl_cli.storage import replace_text

ENDS = {"done": "FINISHED", "stopped": "KILLED"}
RUN_ID = "mlflow-run-id"
AT_ONCE = 100
"""Parameters and tags that one request may have; a step has fewer than its 1,000 metrics."""


class Mlflow(Background):
    """`uri`: of the tracking server or store. A resumed run goes on in the same run of MLflow, whose id its directory keeps."""

    service, otherwise = "MLflow", "pip install 'asyncrl-cli[mlflow]', or leave out logging.mlflow_uri"

    def __init__(
        self, run_dir: Path, *, uri: str, project: str, name: str, config: Mapping[str, Any], tags: Mapping[str, str]
    ) -> None:
        self._uri, self._project, self._config, self._tags = uri, project, config, {**tags, "mlflow.runName": name}
        self._id_file = run_dir / RUN_ID
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
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(self._project)
        self._run_id = self._client.create_run(experiment_id, tags=self._tags).info.run_id
        replace_text(self._id_file, self._run_id)
        params = [Param(key, str(value)[:6000]) for key, value in self._config.items()]
        for start in range(0, len(params), AT_ONCE):
            self._client.log_batch(self._run_id, params=params[start : start + AT_ONCE])

    def write(self, line: Mapping[str, Any]) -> None:
        from mlflow.entities import Metric

        now_ms, numbers = int(time.time() * 1000), {key: value for key, value in line.items() if is_number(value)}
        # MLflow takes no "@" in a name: best@8 is best_at_8.
        metrics = [Metric(key.replace("@", "_at_"), value, now_ms, line["step"]) for key, value in numbers.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def finish(self, status: Mapping[str, Any]) -> None:
        self._client.set_terminated(self._run_id, ENDS.get(status["phase"], "FAILED"))
