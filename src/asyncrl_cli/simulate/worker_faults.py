"""The faults of one simulated worker: those with a time set in on its own clock, the others are met by its calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from asyncrl_cli.loop.signal import background
from asyncrl_cli.simulate.calls import Calls
from asyncrl_cli.simulate.faults import Fault, FaultKind, Faults


class WorkerFaults:
    """Call inside the running loop. `freeze()` stops the worker's engine, when the worker dies or hangs, and returns its calls.

    It stays when the worker is restarted: what is still to happen then happens to the next process.
    """

    def __init__(self, name: str, faults: Faults, freeze: Callable[[], Calls]) -> None:
        self._name = name
        self._faults = faults
        self._freeze = freeze
        self._counts = dict.fromkeys(FaultKind, 0)
        happens = {FaultKind.WORKER_DIES: self._die, FaultKind.WORKER_HANGS: self._hang}
        with background():
            for fault in faults.at(name):
                asyncio.get_running_loop().call_at(fault.at_s, happens[fault.kind], fault)

    def meets(self, kind: FaultKind) -> Fault | None:
        """The fault, if any, of this call: the next one of its kind."""
        if not self._faults.pending:
            return None
        self._counts[kind] += 1
        return self._faults.of_call(kind, self._name, self._counts[kind])

    def _die(self, fault: Fault) -> None:
        self._faults.happens(fault)
        self._freeze().die(f"{self._name} failed: simulated death at {fault.at_s:g} s")

    def _hang(self, fault: Fault) -> None:
        self._faults.happens(fault)
        self._freeze().hang()
