"""status.json as a driver leaves it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncrl_cli.contracts.status import RunFacts, Status, parse_status
from asyncrl_cli.observe.observers import Observers
from asyncrl_cli.observe.sinks import to_json

FACTS = RunFacts(
    name="brave-otter",
    profile="partial-rollout",
    mode="partial-rollout",
    run_dir="runs/brave-otter",
    train_steps=300,
    step_groups=16,
    window_groups=16,
    trigger_parameter_sync_step=1,
    max_staleness=1,
)


def document_of(**changed: Any) -> dict[str, Any]:
    """The status of a run that has just begun, as JSON, but for what is `changed`."""
    document = Observers(FACTS, [], clock=lambda: 0.0).live.picture().to_json()
    return {**document, **changed, "progress": {**document["progress"], **changed.get("progress", {})}}


def status_of(**changed: Any) -> Status:
    """The same, as a reader gets it."""
    return parse_status(to_json(document_of(**changed)))


def write_status(directory: Path, **changed: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    names = {"name": directory.name, "profile": "agent-guess+partial-rollout", "run_dir": str(directory)}
    (directory / "status.json").write_text(to_json(document_of(**names | changed)), encoding="utf-8")
    return directory
