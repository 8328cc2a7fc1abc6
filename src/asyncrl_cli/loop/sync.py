"""Weights on their way to the workers: send beside generation, load worker by worker.

    trainer --gather--> publish --offer--> [newest] --prefetch--> worker's second buffer --load--> worker generates

At most two published versions exist: the one being loaded and the newest. A newer one replaces one that no worker has
begun; where two are begun, the next gather waits (`room`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from asyncrl_cli.loop.ports import LoadReport, Published
from asyncrl_cli.loop.watching import SyncSummary


class WeightSync:
    """Which version each worker holds, which it has begun, and what the last complete sync cost. Pure state."""

    def __init__(self, workers: Mapping[str, int]) -> None:
        """`workers`: the version that each worker holds, -1 if none yet."""
        self.held = dict(workers)
        self._holders = Counter(self.held.values())
        self.begun: dict[str, int] = {}
        self.received: dict[str, int] = {}
        """Of what was begun: what has arrived, and waits for its load or is loaded."""
        self.newest: Published | None = None
        self.summary: SyncSummary | None = None
        self._gather_s: dict[int, float] = {}
        self._reports: dict[int, list[LoadReport]] = {}

    @property
    def room(self) -> bool:
        """Whether one more version may be published."""
        return len(set(self.begun.values())) < 2

    def all_hold(self, version: int) -> bool:
        return self._holders.keys() == {version}

    def reserve(self) -> None:
        """A newer version is about to be gathered. While an older one loads, it replaces one that nobody has begun: from now on,
        or a third version would exist as soon as somebody began that one."""
        if self.begun and self.newest is not None and self.newest.version not in self.begun.values():
            self.newest = None

    def gathered(self, version: int, gather_s: float) -> None:
        self._gather_s[version] = gather_s

    def offer(self, published: Published) -> None:
        assert self.newest is None or published.version > self.newest.version, "versions only rise"
        self.newest = published

    def wanted(self, worker: str) -> Published | None:
        """What `worker` should begin now."""
        if self.newest is not None and self.newest.version > self.held[worker]:
            return self.newest
        return None

    def begin(self, worker: str, version: int) -> None:
        self.begun[worker] = version

    def receive(self, worker: str) -> None:
        self.received[worker] = self.begun[worker]

    def loaded(self, worker: str, report: LoadReport) -> None:
        del self.begun[worker]
        self.received.pop(worker, None)
        self.hold(worker, report.version)
        self._reports.setdefault(report.version, []).append(report)
        self._summarise()

    def hold(self, worker: str, version: int) -> None:
        """The worker has that version, from a load or from its start."""
        before = self.held[worker]
        self._holders[before] -= 1
        if not self._holders[before]:
            del self._holders[before]
        self.held[worker] = version
        self._holders[version] += 1

    def lost(self, worker: str) -> None:
        """The worker's process is gone, and what it held or had begun with it. Its next one begins with the newest version:
        `newest` keeps the handle, or a newer one is about to be offered (`reserve`)."""
        self.begun.pop(worker, None)
        self.received.pop(worker, None)
        self.hold(worker, -1)

    def _summarise(self) -> None:
        """The last version that every worker loaded or skipped; figures are the worst over the workers that loaded it."""
        complete = [version for version in self._reports if version <= min(self._holders)]
        version = max(complete, default=-1)
        if version <= (-1 if self.summary is None else self.summary.version):
            return
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
            logprob_abs_diff=max(diffs) if diffs else None,
            loaded_share=max(shares, key=lambda share: abs(share - 1)) if shares else None,
            unclear_loads=verdicts.count("unclear") if verdicts else None,
        )
        for kept in (self._reports, self._gather_s):
            for old in [key for key in kept if key < version]:
                del kept[old]
