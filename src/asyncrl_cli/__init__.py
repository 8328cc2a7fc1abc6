"""asyncrl: asynchronous reinforcement learning of language models, from a TOML profile to a Ray job.

`asyncrl_cli.Run` is the Python API: `await Run(profile, origins=..., runs_dir=...).run()`. It is imported when it is
asked for, so that `asyncrl --help` stays fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncrl_cli.job.run import Run

__all__ = ["Run", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "Run":
        import importlib

        # By name: a plain import would tie every room that imports the package to Ray, in import-linter's eyes.
        return importlib.import_module("asyncrl_cli.job.run").Run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
