"""Weights on their way to the workers: send beside generation, load worker by worker.

    trainer --gather--> publish --offer--> [newest] --prefetch--> worker's second buffer --load--> worker generates

At most two published versions exist: the one being loaded and the newest. A newer one replaces one that no worker has
begun; where two are begun, the next gather waits (`room`).
"""

from __future__ import annotations

from collections.abc import Collection

from asyncrl_cli.loop.ports import LoadReport, Published
from asyncrl_cli.loop.slots import WorkerSlots
from asyncrl_cli.loop.watching import SyncSummary


class WeightSync:
    """Which version the workers should load, and what the last complete sync cost. Pure state."""

    def __init__(self, workers: Collection[WorkerSlots]) -> None:
        self.newest: Published | None = None
        self.summary: SyncSummary | None = None
        self._workers = workers
        self._gather_s: dict[int, float] = {}
        self._reports: dict[int, list[LoadReport]] = {}

    @property
    def begun(self) -> dict[str, int]:
        """What each worker that receives or loads a version has begun."""
        return {worker.name: worker.begun for worker in self._workers if worker.begun is not None}

    @property
    def room(self) -> bool:
        """Whether one more version may be published."""
        return len(set(self.begun.values())) < 2

    def reserve(self) -> None:
        """A newer version is about to be gathered. If an older one is being loaded, nobody may begin the one in between any
        more: that would make three."""
        begun = self.begun.values()
        if begun and self.newest is not None and self.newest.version not in begun:
            self.newest = None

    def gathered(self, version: int, gather_s: float) -> None:
        self._gather_s[version] = gather_s

    def offer(self, published: Published) -> None:
        assert self.newest is None or published.version > self.newest.version, "versions only rise"
        self.newest = published

    def wanted(self, worker: WorkerSlots) -> Published | None:
        """What the worker should begin now. After a restart that is the newest version again, whose handle is kept here, or a
        newer one that is about to be offered (`reserve`)."""
        return self.newest if self.newest is not None and self.newest.version > worker.version else None

    def loaded(self, report: LoadReport) -> None:
        """A worker has loaded a version, and holds it by now."""
        self._reports.setdefault(report.version, []).append(report)
        held_by_all = min([worker.version for worker in self._workers])
        version = max([version for version in self._reports if version <= held_by_all], default=-1)
        if version > (-1 if self.summary is None else self.summary.version):
            self._summarise(version)

    def _summarise(self, version: int) -> None:
        """The last version that every worker loaded or skipped; figures are the worst over the workers that loaded it."""
        reports = self._reports[version]
        diffs = [report.logprob_abs_diff for report in reports if report.logprob_abs_diff is not None]
        shares = [report.loaded_share for report in reports if report.loaded_share is not None]
        verdicts = [report.verdict for report in reports if report.verdict is not None]
        self.summary = SyncSummary(
            version=version,
            gather_s=self._gather_s.get(version),
            send_s=max(report.send_s for report in reports),
            load_s=max(report.load_s for report in reports),
            pause_s=max(report.pause_s for report in reports),
            logprob_abs_diff=max(diffs, default=None),
            loaded_share=max(shares, key=lambda share: abs(share - 1), default=None),
            unclear_loads=verdicts.count("unclear") if verdicts else None,
        )
        self._reports = {later: reports for later, reports in self._reports.items() if later >= version}
        self._gather_s = {later: gather_s for later, gather_s in self._gather_s.items() if later >= version}
