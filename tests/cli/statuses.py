"""status.json as a driver leaves it."""

from __future__ import annotations

import json
from typing import Any

from asyncrl_cli.checkpoint.run_directory import RunDirectory
from asyncrl_cli.observe.live_status import RunFacts
from asyncrl_cli.observe.observers import Observers


def say_status(directory: RunDirectory, **changed: Any) -> None:
    facts = RunFacts(
        name=directory.name,
        profile="agent-guess+partial-rollout",
        mode="partial-rollout",
        run_dir=str(directory.path),
        train_steps=9,
        step_groups=1,
        window_groups=1,
        trigger_parameter_sync_step=1,
        max_staleness=1,
    )
    picture = Observers(facts, [], clock=lambda: 0.0).live.picture()
    directory.status.write_text(json.dumps(picture | changed), encoding="utf-8")
