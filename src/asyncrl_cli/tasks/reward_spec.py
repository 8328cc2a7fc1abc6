"""What a task's reward is: a small picklable description that a reward process builds the real thing from, and its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpec:
    """`dataset` and `params` say which verifier and whose items; `adapter` how the answer is found in a response.

    `import_path` is the directory that a `module:function` is looked up in first: where the command was started.
    `module_file` is where it was found; `only_there`: it is imported from that file or not at all.
    """

    kind: Literal["dataset", "exact-match", "math-verify", "function"]
    dataset: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    adapter: Literal["plain", "worked"] = "plain"
    function: str = ""
    import_path: str = ""
    module_file: str = ""
    only_there: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """What a reward process says first; `failure` is why it cannot score ("" if it can). `module_file` is where it found a function
    of the user's; `at_once`: how many rewards it takes together."""

    failure: str
    module_file: str = ""
    at_once: int = 1
