"""What vLLM's own stat logger tells of each engine step, added up."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from asyncrl_cli.engines.port import EngineCounters

if TYPE_CHECKING:
    from vllm.v1.metrics.loggers import StatLoggerBase

SCORE_PREFIX = "score-"
"""Requests named so are scores: the token that each samples is thrown away, and is no part of a response."""


class VllmCounters:
    """One engine's figures. vLLM's scheduler reports once per forward pass, and its frontend what came of the pass.

    `decode_steps`: passes that sampled a token of a response, so those that only scored are not among them. `preemptions`:
    for want of cache. vLLM also preempts what runs when all caches are cleared for a load; those are not counted.
    """

    def __init__(self) -> None:
        self.decode_steps = 0
        self.preemptions = 0
        self._cleared = 0
        self._gauges: dict[str, float] = {}

    def caches_cleared(self) -> None:
        """Call it in the pause: of each response that ran, vLLM will tell one preemption with its next token."""
        self._cleared = int(self._gauges.get("engine_running", 0))

    def record(self, scheduler: Any, iteration: Any) -> None:
        """`SchedulerStats` and `IterationStats` of vLLM; either may be None."""
        if scheduler is not None:
            self._gauges = {
                "kv_cache_usage": scheduler.kv_cache_usage,
                "engine_running": scheduler.num_running_reqs,
                "engine_waiting": scheduler.num_waiting_reqs + scheduler.num_skipped_waiting_reqs,
            }
        if iteration is not None:
            cleared = min(self._cleared, iteration.num_preempted_reqs)
            self._cleared -= cleared
            self.preemptions += iteration.num_preempted_reqs - cleared
            scored = sum((ended.request_id or "").startswith(SCORE_PREFIX) for ended in iteration.finished_requests)
            self.decode_steps += iteration.num_generation_tokens > scored

    def counters(self) -> EngineCounters:
        """Gauges are absent until the first forward pass."""
        return EngineCounters(sums={"preemptions": self.preemptions}, gauges=dict(self._gauges))


def logger_into(counters: VllmCounters) -> Callable[[Any, int], StatLoggerBase]:
    """A stat logger as vLLM makes it, one per engine process."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class IntoCounters(StatLoggerBase):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0) -> None:
            counters.record(scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None:
            pass

    return IntoCounters
