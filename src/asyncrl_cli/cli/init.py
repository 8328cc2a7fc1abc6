"""`asyncrl init`: a directory to start from, copied from a template."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from asyncrl_cli.cli.console import print_text, say
from asyncrl_cli.errors import ConfigError, RefusedError

EXAMPLES = """
  asyncrl init jsonl my-task      prompts in a file, a reward function of your own, a profile
  cd my-task && asyncrl train --profile profile.toml"""


def command(
    template: Annotated[str, typer.Argument(metavar="TEMPLATE", help="Name of the template: jsonl.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory to write, new or empty.")],
) -> None:
    """Copy a template for a task of your own: its files are ready to train."""
    import shutil

    source = _find(template)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise RefusedError(f"{directory} exists and is not empty", hint="name a new directory: nothing is overwritten")
    shutil.copytree(source, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            print_text(str(path))
    say(f"next: cd {directory} && asyncrl train --profile profile.toml")


def _find(template: str) -> Path:
    from asyncrl_cli.profile.toml_files import shipped_directory

    known = {path.name: path for path in sorted(shipped_directory("templates").iterdir()) if path.is_dir()}
    if template not in known:
        raise ConfigError(f"there is no template '{template}'", hint=f"templates: {', '.join(known)}")
    return known[template]
