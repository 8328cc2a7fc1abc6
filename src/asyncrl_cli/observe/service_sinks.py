"""Sinks whose service may be slow: Weights & Biases, TensorBoard and MLflow."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
import uuid
from concurrent.futures import Future
from importlib.util import find_spec
from itertools import groupby, islice
from pathlib import Path

from asyncrl_cli.base.errors import PreflightError
from asyncrl_cli.base.storage import replace_text
from asyncrl_cli.contracts.status import Status
from asyncrl_cli.observe.format import LEADING, is_number
from asyncrl_cli.observe.recorded import Recorded
from asyncrl_cli.observe.run_lines import Line
from asyncrl_cli.observe.sinks import Sink
from asyncrl_cli.profile.arithmetic import mode_of
from asyncrl_cli.profile.keys import entries_of
from asyncrl_cli.profile.schema import Profile

log = logging.getLogger("asyncrl")

QUEUED_LINES = 10_000
"""Lines that may wait while the service is slow: hours of steps, a few MB."""
START_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 60.0
EARLY_CLOSE_TIMEOUT_S = 3.0
"""For a run that was stopped or has failed: someone may wait at the terminal, and metrics.jsonl has every
line."""
MLFLOW_ENDS = {"done": "FINISHED", "stopped": "KILLED"}
MLFLOW_AT_ONCE = 100
"""Parameters that MLflow takes in one request. It takes 1,000 metrics, which is more than a step has."""
TABLE_ROWS = 64
"""Trajectories of a step in a table of W&B; its dump in `samples/` has all."""
COLUMNS = ("step", "group", "trajectory", "reward", "versions", "span", "tokens", "finish_reason", "text")


class Background(Sink):
    """Gives every line of metrics.jsonl to `write`, in order. `open`, `write` and `finish` are called in the
    sink's own thread, so that the loop never waits for a network or a disk.

    A subclass has `service`, its name for people, `package`, which it imports, and `otherwise`, a hint for
    when it does not start. The constructor waits (at most a minute) for the service to start, and raises
    PreflightError if it does not. A service that fails later gets no more lines, and the run goes on.
    """

    service: str
    package: str
    otherwise: str

    @classmethod
    def check(cls, profile: Profile) -> None:
        if find_spec(cls.package) is None:
            raise PreflightError(f"{cls.service} did not start: it is not installed", hint=cls.otherwise)

    def __init__(self, profile: Profile, run_dir: Path) -> None:
        self.profile, self.run_dir = profile, run_dir
        self._last: Status | None = None
        self._queue: queue.SimpleQueue[Line | None] = queue.SimpleQueue()
        self._started: Future[None] = Future()
        self._dropped = 0
        self._is_abandoned = False
        self._thread = threading.Thread(target=self._work, name=self.service, daemon=True)
        self._thread.start()
        try:
            self._started.result(START_TIMEOUT_S)
        except Exception as error:  # the service's own error, or a TimeoutError without a message
            why = str(error) or f"it takes longer than {START_TIMEOUT_S:g} s"
            raise PreflightError(f"{self.service} did not start: {why}", hint=self.otherwise) from None

    def open(self) -> None:
        """Start the service. May raise anything."""
        raise NotImplementedError

    def write(self, line: Line) -> None:
        """Log a train step's metrics, over `step`."""
        raise NotImplementedError

    def finish(self, status: Status) -> None:
        """All lines are written, and the run has ended with this status."""
        raise NotImplementedError

    def line(self, line: Line) -> None:
        if self._queue.qsize() < QUEUED_LINES:
            self._queue.put(dict(line))
        else:
            self._dropped += 1

    def end(self, status: Status) -> None:
        """Let the thread finish, at the same time as those of the other sinks. They share one time limit,
        which is short unless the run is `done`."""
        self._last = status
        self._limit_s = CLOSE_TIMEOUT_S if status.phase == "done" else EARLY_CLOSE_TIMEOUT_S
        self._until_s = time.monotonic() + self._limit_s
        if self._dropped:
            log.warning("%s was too slow: %d lines are in metrics.jsonl only", self.service, self._dropped)
        self._queue.put(None)

    def close(self, status: Status) -> None:
        """Wait until all queued lines are written, or the limit has passed."""
        self._thread.join(max(0.0, self._until_s - time.monotonic()))
        if self._thread.is_alive():
            self._is_abandoned = True
            log.warning("%s did not finish within %g s; it is abandoned", self.service, self._limit_s)

    def _work(self) -> None:
        try:
            self.open()
        except Exception as error:  # the constructor raises it
            self._started.set_exception(error)
            return
        self._started.set_result(None)
        try:
            while (line := self._queue.get()) is not None:
                self.write(line)
            assert self._last is not None  # `end` sets it before it ends the queue
            self.finish(self._last)
        except Exception:  # an error of the service must not end the run
            if not self._is_abandoned:  # after `close` gave up, errors of an ending process mean nothing
                log.exception("%s failed and gets no more lines; metrics.jsonl has them all", self.service)


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

    service, package = "TensorBoard", "tensorboard"
    otherwise = "pip install 'asyncrl-cli[tensorboard]', or --set logging.tensorboard=false"

    def open(self) -> None:
        from tensorboard.summary import Writer

        self._writer = Writer(str(self.run_dir / "tensorboard"))

    def write(self, line: Line) -> None:
        for key, value in line.items():
            if is_number(value) and key != "step":
                self._writer.add_scalar(key, value, line["step"])
        self._writer.flush()

    def finish(self, status: Status) -> None:
        self._writer.close()


class Mlflow(Background):
    """The configuration as parameters, tags, and every number of a line of metrics.jsonl, in the experiment
    `logging.wandb_project` of the tracking server or store `logging.mlflow_uri`. A resumed run continues the
    same MLflow run, whose id is kept in its directory."""

    service, package = "MLflow", "mlflow"
    otherwise = "pip install 'asyncrl-cli[mlflow]', or leave out logging.mlflow_uri"

    def open(self) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        project, id_file = self.profile.logging.wandb_project, self.run_dir / "mlflow-run-id"
        self._client = MlflowClient(tracking_uri=self.profile.logging.mlflow_uri)
        if id_file.exists():
            self._run_id = id_file.read_text(encoding="utf-8")
            self._client.update_run(self._run_id, "RUNNING")
            return
        found = self._client.get_experiment_by_name(project)
        experiment_id = found.experiment_id if found else self._client.create_experiment(project)
        tags = {**tags_of(self.profile), "mlflow.runName": self.run_dir.name}
        self._run_id = self._client.create_run(experiment_id, tags=tags).info.run_id
        replace_text(id_file, self._run_id)
        params = [Param(key, str(value)[:6000]) for key, value in entries_of(self.profile).items()]
        for start in range(0, len(params), MLFLOW_AT_ONCE):
            self._client.log_batch(self._run_id, params=params[start : start + MLFLOW_AT_ONCE])

    def write(self, line: Line) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        # MLflow takes no "@" in a name: best@8 is best_at_8.
        numbers = {key.replace("@", "_at_"): value for key, value in line.items() if is_number(value)}
        metrics = [Metric(key, value, now_ms, line["step"]) for key, value in numbers.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def finish(self, status: Status) -> None:
        self._client.set_terminated(self._run_id, MLFLOW_ENDS.get(status.phase, "FAILED"))


class Wandb(Background):
    """Logs every line of metrics.jsonl under the same names, over `step`, into `run_dir/wandb`. At the end it
    sets the utilization figures of W&B's summary to those of the whole run, as in `asyncrl status`: W&B would
    keep the last step's.

    Dumped samples become tables `samples`. A resumed run continues the same W&B run: its id is kept in the
    run's directory, because names are not unique within a project.
    """

    service, package = "W&B", "wandb"
    otherwise = "log in with `wandb login`, or --set logging.wandb=offline, or --set logging.wandb=disabled"

    @classmethod
    def check(cls, profile: Profile) -> None:
        """Finds out, without the network, whether a login is stored."""
        if profile.logging.wandb == "online":
            import wandb

            if not wandb.login(prompt=False):
                raise PreflightError("W&B did not start: you are not logged in", hint=cls.otherwise)

    def __init__(self, profile: Profile, run_dir: Path) -> None:
        self._recorded = Recorded(run_dir)
        self._logged_steps = self._recorded.sampled_steps
        super().__init__(profile, run_dir)

    def open(self) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        id_file = self.run_dir / "wandb-run-id"
        if not id_file.exists():
            replace_text(id_file, uuid.uuid4().hex[:12])
        self._run = wandb.init(
            dir=str(self.run_dir),
            id=id_file.read_text(encoding="utf-8"),
            resume="allow",
            name=self.run_dir.name,
            mode=self.profile.logging.wandb,
            project=self.profile.logging.wandb_project,
            config=self.profile.model_dump(mode="json"),
            tags=list(tags_of(self.profile).values()),
            settings=wandb.Settings(
                console="off", silent=True, init_timeout=START_TIMEOUT_S, finish_timeout=CLOSE_TIMEOUT_S
            ),
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, line: Line) -> None:
        import numpy as np
        import wandb

        logged = dict(line)
        for key, value in line.items():
            if isinstance(value, list) and key.endswith("/quantiles"):  # a histogram as if they were samples
                logged[key] = wandb.Histogram(value)
            elif isinstance(value, list):  # counts of 0, 1, 2, ...
                logged[key] = wandb.Histogram(np_histogram=(np.array(value), np.arange(len(value) + 1) - 0.5))
        self._run.log(logged)
        self._write_samples()

    def finish(self, status: Status) -> None:
        self._write_samples()  # the last dump may have come after the last line
        for note in self._recorded.damage.notes:
            log.warning("%s's tables: %s", self.service, note)
        if whole_run := {key: value for key, value in status.totals.items() if key in LEADING}:
            self._run.summary.update(whole_run)
        self._run.finish()

    def _write_samples(self) -> None:
        """Log the dumps that have come since the last call, a row per trajectory. `versions`: which versions
        sampled how many tokens, as in `3: 12, 4: 7`."""
        import wandb

        for step in self._recorded.sampled_steps:
            if step in self._logged_steps:
                continue
            self._logged_steps.append(step)
            table = wandb.Table(columns=list(COLUMNS))
            for sample in islice(self._recorded.samples(step), TABLE_ROWS):
                sampled = zip(sample["versions"], sample["mask"], strict=True)
                versions = [version for version, is_sampled in sampled if is_sampled]
                counts = ", ".join(f"{version}: {len(list(tokens))}" for version, tokens in groupby(versions))
                span = max(versions) - min(versions) if versions else None
                row = {**sample, "versions": counts, "span": span, "tokens": len(versions)}
                table.add_data(*(row.get(column) for column in COLUMNS))
            self._run.log({"samples": table, "step": step})

    def _work(self) -> None:
        try:
            super()._work()
        finally:
            import wandb

            with contextlib.suppress(Exception):  # it has ended already
                wandb.teardown()  # else W&B's own process would outlive ours, and print a traceback
