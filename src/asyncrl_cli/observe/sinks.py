"""The sinks that a profile's `[logging]` asks for, beside the run's own files and its screen."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from asyncrl_cli.errors import PreflightError
from asyncrl_cli.observe.mlflow_sink import Mlflow
from asyncrl_cli.observe.observers import Sink
from asyncrl_cli.observe.prometheus_sink import Prometheus, check_port
from asyncrl_cli.observe.tensorboard_sink import TensorBoard
from asyncrl_cli.observe.wandb_sink import Wandb, check_login
from asyncrl_cli.profile.arithmetic import mode_of
from asyncrl_cli.profile.keys import entries_of
from asyncrl_cli.profile.schema import Profile


def check_sinks(profile: Profile) -> None:
    """Raises PreflightError, before anything is started, for a sink that could not start: no login, no package, no free port."""
    logging = profile.logging
    if logging.wandb == "online":
        check_login()
    for wanted, module, kind in ((logging.tensorboard, "tensorboard", TensorBoard), (logging.mlflow_uri, "mlflow", Mlflow)):
        if wanted and find_spec(module) is None:
            raise PreflightError(f"{kind.service} did not start: it is not installed", hint=kind.otherwise)
    if logging.prometheus_port is not None:
        check_port(logging.prometheus_port)


def make_sinks(profile: Profile, run_dir: Path) -> list[Sink]:
    """Start them. Raises PreflightError if one does not start."""
    logging, name, sinks = profile.logging, run_dir.name, list[Sink]()
    tags = tags_of(profile)
    if logging.wandb != "disabled":
        whole = {"config": profile.model_dump(mode="json"), "tags": list(tags.values())}
        sinks.append(Wandb(run_dir, mode=logging.wandb, project=logging.wandb_project, name=name, **whole))
    if logging.tensorboard:
        sinks.append(TensorBoard(run_dir))
    if logging.mlflow_uri:
        flat: dict[str, Any] = entries_of(profile)
        sinks.append(Mlflow(run_dir, uri=logging.mlflow_uri, project=logging.wandb_project, name=name, config=flat, tags=tags))
    if logging.prometheus_port is not None:
        sinks.append(Prometheus(logging.prometheus_port, name))
    return sinks


def tags_of(profile: Profile) -> dict[str, str]:
    """What people filter runs by; at most 64 characters each, as W&B wants it."""
    model = profile.model.path.rstrip("/").rpartition("/")[2]
    tags = {"profile": profile.name, "mode": mode_of(profile), "engine": profile.rollout.engine, "model": model}
    return {key: value[:64] for key, value in tags.items()}
