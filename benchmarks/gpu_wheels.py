"""Downloads the wheels that a GPU machine without a network needs for gpu_smoke.py, beside the torch that it
has.

    python benchmarks/gpu_wheels.py DIR [--python 3.12]

    there:  python3 -m pip install --no-index --no-deps --target SITE DIR/*.whl
            PYTHONPATH=SITE:src python3 benchmarks/gpu_smoke.py

What torch and transformers bring along (numpy, safetensors, tokenizers, huggingface-hub, ...) is expected
there. Exits with 1 if the wheels are larger than 64 MiB together.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

WHEELS = (
    "pydantic",
    "pydantic-core",
    "annotated-types",
    "typing-inspection",
    "typing-extensions",
    "tomli",
    "transformers==5.19.0",
)
PLATFORMS = ("manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux_2_28_x86_64", "any")
MAX_BYTES = 64 * 2**20


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--python", default="3.12", help="the machine's version")
    options = parser.parse_args()
    for_machine = ["--python-version", options.python, "--implementation", "cp", "--only-binary=:all:"]
    for_machine += [word for platform in PLATFORMS for word in ("--platform", platform)]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(options.directory),
    ]
    subprocess.run([*command, *for_machine, *_pinned()], check=True)
    wheels = sorted(options.directory.glob("*.whl"))
    for wheel in wheels:
        print(f"{wheel.stat().st_size / 2**20:6.1f} MiB  {wheel.name}")
    num_bytes = sum(wheel.stat().st_size for wheel in wheels)
    print(f"{num_bytes / 2**20:6.1f} MiB  together")
    return int(num_bytes > MAX_BYTES)


def _pinned() -> list[str]:
    """pydantic needs exactly one version of its core: the one of the pydantic that is installed here."""
    return [f"{name}=={version(name)}" if name.startswith("pydantic") else name for name in WHEELS]


if __name__ == "__main__":
    sys.exit(main())
