"""Arguments of vLLM: which there are. Imports no vLLM."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

from asyncrl_cli.profile.vllm_arguments import OURS


def names_in_source() -> frozenset[str] | None:
    """What vLLM's AsyncEngineArgs takes, read from its source: to import it takes 15 s, and writes warnings to stderr.

    None where vLLM is not installed, or its source is not as we know it: then only the engine's start can tell.
    """
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        return None
    try:
        tree = ast.parse((Path(found.origin).parent / "engine" / "arg_utils.py").read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if not {"EngineArgs", "AsyncEngineArgs"} <= classes.keys():
        return None
    names = frozenset(_fields(classes["EngineArgs"]) | _fields(classes["AsyncEngineArgs"]))
    return names if OURS.keys() <= names else None


def _fields(dataclass: ast.ClassDef) -> set[str]:
    annotated = [node for node in dataclass.body if isinstance(node, ast.AnnAssign)]
    return {node.target.id for node in annotated if isinstance(node.target, ast.Name)}
