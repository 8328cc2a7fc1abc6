"""What a search recommends as a profile file: for `bench --profile`, which gives it to one side only, and for `train`."""

from __future__ import annotations

from pathlib import Path

from asyncrl_cli import __version__
from asyncrl_cli.bench.tune import Tuned
from asyncrl_cli.errors import ConfigError, RefusedError
from asyncrl_cli.profile.keys import PARAMS
from asyncrl_cli.profile.loaded import set_layer
from asyncrl_cli.profile.toml_files import is_file_reference, locate, toml_key, toml_value


def check_new(path: Path) -> None:
    """Before the search, so that it is not made for nothing. Raises ConfigError or RefusedError unless `path` can be written."""
    if path.suffix != ".toml":
        raise ConfigError(f"--out {path}: a profile's file ends in .toml", hint=f"--out {path.with_suffix('.toml')}")
    if path.exists():
        raise RefusedError(f"{path} exists and is not overwritten", hint=f"--out {_free(path)}")
    if not path.parent.is_dir():
        raise RefusedError(f"there is no directory {path.parent}", hint=f"--out {path.name}")


def write_profile(tuned: Tuned, path: Path, command: str, *, is_run: bool) -> None:
    """`command` is the search as it was typed; `is_run`: it was calibrated on a run, whose profile is extended.

    Raises RefusedError if someone else has made the file meanwhile, OSError if it cannot be written.
    """
    text = profile_text(tuned, path, command, is_run=is_run)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise RefusedError(f"{path} exists and is not overwritten", hint=f"--out {_free(path)}") from None


def profile_text(tuned: Tuned, path: Path, command: str, *, is_run: bool) -> str:
    best, current = tuned.found.best, tuned.found.current
    before = "" if current is None else f" (before: {current.setting.split}, {current.window_time_s:.4g} s)"
    lines = [
        f"# Recommended by a SIMULATED search (asyncrl {__version__}):",
        f"#   {command}",
        f"# {best.setting.split} trainer:rollout, {best.window_time_s:.4g} s per {tuned.window_groups} groups{before}.",
        *([] if is_run else [f"# What {tuned.workload.name} itself sets ([profile]: model, sizes) is no part of this file."]),
        f"extends = {toml_value(_extended(tuned.profile, path))}",
        f"purpose = {toml_value(f'Tuned for {tuned.workload.name} by a simulated search: {tuned.bound}.')}",
    ]
    tables: dict[str, list[str]] = {}
    for key, value in set_layer(tuned.recommended_sets).values.items():
        section, _, name = key.partition(".")
        if key.startswith(f"{PARAMS}."):
            name = f"params.{toml_key(key.removeprefix(f'{PARAMS}.'))}"
        tables.setdefault(section, []).append(f"{name} = {toml_value(value)}")
    for section, entries in tables.items():
        lines += ["", f"[{section}]", *entries]
    return "\n".join(lines) + "\n"


def _extended(reference: str, path: Path) -> str:
    """A name, or a file: relative where it lies below the new file's directory, so that both can be moved together."""
    if not is_file_reference(reference):
        return reference
    above, here = locate(reference, relative_to=Path.cwd(), asked_by="--profile"), path.parent.resolve()
    return f"./{above.relative_to(here)}" if above.is_relative_to(here) else str(above)


def _free(path: Path) -> Path:
    """`my.toml` -> `my-2.toml`."""
    number = 2
    while (free := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    return free
