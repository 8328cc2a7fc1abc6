"""Records a simulated run in files, as a real one is, for whatever reads a run: `asyncrl trace`, `report`, `status`, `bench`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from asyncrl_cli.checkpoint.run_directory import RunDirectory
from asyncrl_cli.loop.watching import Observer
from asyncrl_cli.observe.live_status import RunFacts
from asyncrl_cli.observe.observers import EventsFile, MetricsFile, Observers, Sink, StatusFile, TimelineFile
from asyncrl_cli.profile.loaded import Loaded, to_document, to_toml


@contextmanager
def recorded(loaded: Loaded, directory: Path) -> Iterator[Observer]:
    """An observer for `simulate` that writes a run's files to the new `directory`. Raises RefusedError if it exists already."""
    profile, origins = loaded.profile, loaded.origins
    document, toml = to_document(profile, origins), to_toml(profile, origins)
    with closing(RunDirectory.create(directory.parent, directory.name, profile_toml=toml, resolved=document)) as files:
        facts = replace(RunFacts.of(profile, files.path, 1), profile=f"SIMULATED {profile.name}")
        sinks = [MetricsFile(files.metrics), EventsFile(files.events), TimelineFile(files.timeline), _LastStatus(files.status)]
        observers, phase = Observers(facts, sinks, clock=_virtual_s), "failed"
        try:
            yield observers
            phase = "done"
        finally:
            observers.close(phase)


class _LastStatus(StatusFile):
    """Nobody watches a simulated run: its status.json is written once, at the end."""

    status = Sink.status


def _virtual_s() -> float:
    """The virtual clock, which begins at 0 with the simulation's event loop."""
    with suppress(RuntimeError):
        return asyncio.get_running_loop().time()
    return 0.0
