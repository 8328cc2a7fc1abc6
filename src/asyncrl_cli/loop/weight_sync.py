"""The versions on their way to the rollout workers. A version is sent while a worker generates, and loaded
worker by worker.

    trainer --gather--> publish --offer--> [newest] --prefetch--> second buffer --load--> worker generates

At most two published versions exist: the one being loaded and the newest. A newer version replaces one that
no worker has begun to receive; once workers have begun two, the next gather waits (`WeightSync.has_room`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TypeVar

from asyncrl_cli.contracts.weight_version import LoadReport, Published
from asyncrl_cli.loop.fleet import WorkerSlots

T = TypeVar("T")


class WeightSync:
    """Which version the workers should load, and what the last complete sync cost. Pure state."""

    def __init__(self, workers: Collection[WorkerSlots]) -> None:
        self.newest: Published | None = None
        self.withdrawn = -1
        """The last version that was published but given up for a newer one before every worker had begun
        it."""
        self.summary: dict[str, float | int | None] = {}
        """The last version that every worker has loaded or skipped, with maxima over the workers that loaded
        it. `bytes`: those that each fetched, or is sent where they are not counted. `gather_s`: None if the
        version came from a checkpoint. `loaded_share`: the one farthest from 1. `unclear_loads`: the number
        of loads whose probes could not tell the version from the previous one. Empty before the first such
        version."""
        self._summarised = -1
        self._workers = workers
        self._costs: dict[int, tuple[float | None, int | None]] = {}
        """By version: the seconds of its gather, and the bytes sent to each worker."""
        self._reports: dict[int, list[LoadReport]] = {}

    @property
    def begun(self) -> dict[str, int]:
        """The version that each worker is receiving or loading, by worker. Other workers are left out."""
        return {worker.name: worker.begun for worker in self._workers if worker.begun is not None}

    @property
    def has_room(self) -> bool:
        """Whether one more version may be published."""
        return len(set(self.begun.values())) < 2

    def reserve(self) -> None:
        """Call before a newer version is gathered. While an older version is being loaded, withdraw the one
        in between, unless a worker has begun it: there would be three versions."""
        begun = self.begun.values()
        if begun and self.newest is not None and self.newest.version not in begun:
            self.withdrawn, self.newest = self.newest.version, None

    def offer(self, published: Published, gather_s: float | None = None) -> None:
        assert self.newest is None or published.version > self.newest.version, "versions only rise"
        self.newest = published
        self._costs[published.version] = gather_s, published.num_bytes or None

    def wanted(self, worker: WorkerSlots) -> Published | None:
        """The version that the worker should begin now, if any. After a restart it loads the newest version
        again (its handle is kept here), or waits for the one that is about to be offered (`reserve`)."""
        return self.newest if self.newest is not None and self.newest.version > worker.version else None

    def loaded(self, report: LoadReport) -> None:
        """Take in the report of a load. The worker's `version` must already be the loaded one."""
        self._reports.setdefault(report.version, []).append(report)
        held_by_all = min([worker.version for worker in self._workers if not worker.away])
        version = max([version for version in self._reports if version <= held_by_all], default=-1)
        if version <= self._summarised:
            return
        self._summarised, reports = version, self._reports[version]
        gather_s, num_bytes = self._costs.get(version, (None, None))
        verdicts = _known([report.verdict for report in reports])
        self.summary = {
            "version": version,
            "bytes": max(_known(one.fetched_bytes for one in reports), default=num_bytes),
            "gather_s": gather_s,
            "send_s": max(report.send_s for report in reports),
            "load_s": max(report.load_s for report in reports),
            "pause_s": max(report.pause_s for report in reports),
            "logprob_abs_diff": max(_known(one.logprob_abs_diff for one in reports), default=None),
            "logprob_abs_diff_median": max(
                _known(one.logprob_abs_diff_median for one in reports), default=None
            ),
            "loaded_share": max(
                _known(one.loaded_share for one in reports), key=lambda share: abs(share - 1), default=None
            ),
            "unclear_loads": verdicts.count("unclear") if verdicts else None,
        }
        self._reports = {later: reports for later, reports in self._reports.items() if later >= version}
        self._costs = {later: costs for later, costs in self._costs.items() if later >= version}


def _known(measured: Iterable[T | None]) -> list[T]:
    return [one for one in measured if one is not None]
