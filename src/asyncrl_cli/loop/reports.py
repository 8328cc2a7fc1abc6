"""The newest report of every executor, and their spans on the driver's clock."""

from __future__ import annotations

from asyncrl_cli.loop.states import ExecutorReport, Span


class ReportBook:
    """Collects reports and hands out spans that everybody has reported up to.

    Executors have clocks of their own. A report made at `now_s` arrives later, so `arrival - now_s` bounds the difference of the
    clocks from above; the least of them seen so far is the best estimate (Cristian's algorithm, one way).
    """

    def __init__(self) -> None:
        self.latest: dict[str, ExecutorReport] = {}
        self._offset_s: dict[str, float] = {}
        self._spans: dict[str, list[Span]] = {}

    def add(self, report: ExecutorReport, arrived_s: float) -> bool:
        """Take a report in; true if the executor has made tokens since the last one."""
        previous = self.latest.get(report.name)
        self.latest[report.name] = report
        offset_s = min(arrived_s - report.now_s, self._offset_s.get(report.name, float("inf")))
        self._offset_s[report.name] = offset_s
        spans = self._spans.setdefault(report.name, [])
        spans.extend(Span(state=span.state, start_s=span.start_s + offset_s, end_s=span.end_s + offset_s) for span in report.spans)
        return previous is None or _tokens(previous) != _tokens(report)

    def take_spans(self) -> dict[str, tuple[Span, ...]]:
        """Spans up to the moment that every executor has reported; what came later is kept for the next call."""
        if not self.latest:
            return {}
        until_s = min(report.now_s + self._offset_s[name] for name, report in self.latest.items())
        taken: dict[str, tuple[Span, ...]] = {}
        for name, spans in self._spans.items():
            taken[name] = tuple(
                Span(state=span.state, start_s=span.start_s, end_s=min(span.end_s, until_s))
                for span in spans
                if span.start_s < until_s
            )
            self._spans[name] = [
                Span(state=span.state, start_s=max(span.start_s, until_s), end_s=span.end_s)
                for span in spans
                if span.end_s > until_s
            ]
        return taken


def _tokens(report: ExecutorReport) -> dict[str, float]:
    """Its sums of tokens: only these tell work from waiting (sums of seconds always grow)."""
    return {name: amount for name, amount in report.sums.items() if name.endswith("_tokens")}
