"""Before a first run: `asyncrl doctor`, what asyncrl finds on this machine; `asyncrl init`, a directory to start from."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from asyncrl_cli import __version__
from asyncrl_cli.cli.console import JsonOption, print_json, print_text, say, stdout
from asyncrl_cli.errors import ConfigError, PreflightError, RefusedError

MARKS = {True: Text("ok", "green"), False: Text("missing", "red"), None: Text()}
DOCTOR_EXAMPLES = """
  asyncrl doctor
  asyncrl doctor --json || echo something needed is missing
  asyncrl doctor --fix"""
INIT_EXAMPLES = """
  asyncrl init jsonl my-task      prompts in a file, a reward function of your own, a profile
  cd my-task && asyncrl train --profile profile.toml"""


def doctor(
    as_json: JsonOption = False,
    fix: Annotated[
        bool, typer.Option("--fix", help="Uninstall packages that were installed with vLLM and cannot be loaded with this torch.")
    ] = False,
) -> None:
    """Check this machine: versions, cores, GPUs, Ray, engines. Exits with 3 if something that is needed is missing."""
    from asyncrl_cli.plan import machine

    if fix and (broken := machine.broken_packages()):
        _uninstall(broken)
        # A failed import leaves its traces in this process: what is left is looked at in a fresh one.
        again = [sys.executable, "-m", "asyncrl_cli", "doctor", *(["--json"] if as_json else [])]
        raise typer.Exit(subprocess.run(again, check=False).returncode)
    findings = [machine.Finding("asyncrl", __version__), *machine.examine(say)]
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        table = Table(box=None, pad_edge=False, show_header=False)
        for finding in findings:
            hint = f"  hint: {finding.hint}" if finding.hint and not finding.ok else ""
            table.add_row(finding.what, MARKS[finding.ok], f"{finding.found}{hint}")
        stdout().print(table)
    if any(finding.ok is False for finding in findings):
        raise typer.Exit(3)


def _uninstall(packages: list[str]) -> None:
    listed = ", ".join(packages)
    say(f"uninstalling {listed}: not usable beside this torch, and not needed by vLLM")
    done = subprocess.run([sys.executable, "-m", "pip", "uninstall", "--yes", "--quiet", *packages], check=False)
    if done.returncode:
        raise PreflightError(f"pip could not uninstall {listed}", hint=f"remove them by hand: pip uninstall {' '.join(packages)}")


def init(
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
