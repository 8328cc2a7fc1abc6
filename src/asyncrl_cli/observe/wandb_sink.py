"""The sink for Weights & Biases: metrics, configuration and tags, and tables of sampled trajectories with
their versions."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Mapping
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from asyncrl_cli.base.errors import PreflightError
from asyncrl_cli.base.storage import replace_text
from asyncrl_cli.contracts.status import Status
from asyncrl_cli.observe.format import LEADING
from asyncrl_cli.observe.line_types import Line
from asyncrl_cli.observe.recorded import Recorded
from asyncrl_cli.observe.service_sinks import CLOSE_TIMEOUT_S, START_TIMEOUT_S, Background, tags_of
from asyncrl_cli.profile.schema import Profile

TABLE_ROWS = 64
"""Trajectories of a step in a table; its dump in `samples/` has all."""
COLUMNS = ("step", "group", "trajectory", "reward", "versions", "span", "tokens", "finish_reason", "text")


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
        self._run.log({key: _chart(key, value) for key, value in line.items()})
        self._write_samples()

    def finish(self, status: Status) -> None:
        self._write_samples()  # the last dump may have come after the last line
        if whole_run := {key: value for key, value in status.totals.items() if key in LEADING}:
            self._run.summary.update(whole_run)
        self._run.finish()

    def _write_samples(self) -> None:
        """Log the dumps that have come since the last call."""
        import wandb

        for step in self._recorded.sampled_steps:
            if step not in self._logged_steps:
                self._logged_steps.append(step)
                rows = [sample_row(sample) for sample in islice(self._recorded.samples(step), TABLE_ROWS)]
                self._run.log({"samples": wandb.Table(columns=list(COLUMNS), data=rows), "step": step})

    def _work(self) -> None:
        try:
            super()._work()
        finally:
            import wandb

            with contextlib.suppress(Exception):  # it has ended already
                wandb.teardown()  # else W&B's own process would outlive ours, and print a traceback


def sample_row(sample: Mapping[str, Any]) -> list[Any]:
    """A dumped trajectory as a table's row. `versions`: which versions sampled how many tokens, as in `3: 12,
    4: 7`."""
    sampled = zip(sample["versions"], sample["mask"], strict=True)
    versions = [version for version, is_sampled in sampled if is_sampled]
    counts = ", ".join(f"{version}: {len(list(tokens))}" for version, tokens in groupby(versions))
    span = max(versions) - min(versions) if versions else None
    row = {**sample, "versions": counts, "span": span, "tokens": len(versions)}
    return [row.get(column) for column in COLUMNS]


def _chart(key: str, value: Any) -> Any:
    """A value as W&B takes it. Quantiles become a histogram as if they were samples; any other list holds
    counts of 0, 1, 2, ..."""
    if not isinstance(value, list):
        return value
    import numpy as np
    import wandb

    if key.endswith("/quantiles"):
        return wandb.Histogram(value)
    return wandb.Histogram(np_histogram=(np.array(value), np.arange(len(value) + 1) - 0.5))
