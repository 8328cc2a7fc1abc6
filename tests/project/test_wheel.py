"""The built wheel in an environment that has nothing but what listing profiles needs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("typer", "rich", "pydantic", "pydantic-settings", "tomli")


def closure(names: tuple[str, ...]) -> list[metadata.Distribution]:
    """Installed distributions that these need, themselves included; extras and other platforms' left out."""
    found: dict[str, metadata.Distribution] = {}
    waiting = list(names)
    while waiting:
        name = re.split(r"[^A-Za-z0-9._-]", waiting.pop())[0].lower().replace("_", "-")
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        if name not in found:
            found[name] = distribution
            waiting += [
                requirement for requirement in distribution.requires or () if "extra ==" not in requirement
            ]
    return list(found.values())


def copy_distribution(distribution: metadata.Distribution, site_packages: Path) -> None:
    for file in distribution.files or ():
        source = Path(str(distribution.locate_file(file)))
        if ".." in file.parts or "__pycache__" in file.parts or not source.is_file():
            continue
        target = site_packages / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


@pytest.mark.slow
def test_the_wheel_in_an_empty_environment_lists_profiles_and_templates(tmp_path):
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    built = subprocess.run(build, capture_output=True, text=True, timeout=120, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = tmp_path.glob("asyncrl_cli-*.whl")

    venv.create(tmp_path / "venv")
    commands = tmp_path / "venv" / "bin"
    (site_packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    for distribution in closure(NEEDED):
        copy_distribution(distribution, site_packages)
    options = ["--quiet", "--no-deps", "--no-index", str(wheel)]
    install = [sys.executable, "-m", "pip", "--python", str(commands / "python"), "install", *options]
    # no PYTHONPATH: with one, pip may find the wheel installed elsewhere
    bare = {"PATH": "/usr/bin:/bin", "COLUMNS": "120"}
    subprocess.run(install, check=True, timeout=120, env=bare)

    def asyncrl(*arguments: str, exit_code: int = 0) -> str:
        done = subprocess.run(
            [str(commands / "asyncrl"), *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            cwd=tmp_path,
            env=bare,
            check=False,
        )
        assert done.returncode == exit_code, done.stderr
        return done.stdout + done.stderr

    listed = asyncrl("profiles")
    names = [path.stem for path in (ROOT / "profiles").glob("*.toml")]
    assert len(names) == 9
    assert all(name in listed for name in names)
    assert str(site_packages) in asyncrl("profiles", "show", "base", "--origin")
    asyncrl("init", "jsonl", "mine")
    assert (tmp_path / "mine" / "rewards.py").is_file()
    assert ("verl's name for eval.every_versions") in asyncrl(
        "profiles", "keys", "rollout.test_freq", exit_code=2
    )
