"""observe/ and checkpoint/ import light: no ray, no torch, no W&B until it is asked for."""

import subprocess
import sys

PROGRAM = """
import importlib, pkgutil, sys
import asyncrl_cli.checkpoint, asyncrl_cli.observe
for room in (asyncrl_cli.checkpoint, asyncrl_cli.observe):
    for module in pkgutil.iter_modules(room.__path__, room.__name__ + "."):
        importlib.import_module(module.name)
print(sorted({"ray", "torch", "transformers", "vllm", "wandb"} & set(sys.modules)))
"""


def test_the_rooms_import_neither_ray_nor_torch():
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"
