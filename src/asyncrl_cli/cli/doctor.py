"""`asyncrl doctor`: what asyncrl finds on this machine, and what is missing."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from asyncrl_cli import __version__
from asyncrl_cli.cli.console import JsonOption, print_json, say, stdout
from asyncrl_cli.errors import PreflightError

EXAMPLES = """
  asyncrl doctor
  asyncrl doctor --json || echo something needed is missing
  asyncrl doctor --fix"""

MARKS = {True: Text("ok", "green"), False: Text("missing", "red"), None: Text()}


def command(
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
