"""All claims about a run, and the file that keeps the verdicts: `audit.json` in the run's directory."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

from typing_extensions import TypedDict  # pydantic reads typing's own from Python 3.12 on

from asyncrl_cli.audit.accounts import account_claims
from asyncrl_cli.audit.claims import MOST_TEXTS, Claim
from asyncrl_cli.audit.run_files import RunFiles, SampledGroup
from asyncrl_cli.audit.samples import sample_claims
from asyncrl_cli.audit.seals import seal_claims
from asyncrl_cli.audit.weights import logprob_claims
from asyncrl_cli.base.errors import RefusedError
from asyncrl_cli.base.safe_files import Count
from asyncrl_cli.base.storage import replace_text

AUDIT = "audit.json"


class Audit(TypedDict):
    """What readers of `audit.json` use. `train_steps`: how many the run had."""

    schema_version: Literal[1]
    train_steps: Count
    claims: list[Claim]


def audit_run(
    path: Path, *, check_all: bool = False, progress: Callable[..., None] = lambda *_: None
) -> tuple[list[Claim], Path]:
    """The claims, and the file that was written. Raises RefusedError for a run without train steps, or one
    whose configuration cannot be read."""
    progress("reading the run's files")
    files = RunFiles(path)
    if not files.metrics and not files.named("trained"):
        raise RefusedError(f"{path} has no train step to audit", hint="wait until it has trained")
    claims = list(_claims(files, check_all, progress))
    listed = [*files.damaged, *claims[0].wrong][:MOST_TEXTS]  # the causes first
    for damage in files.damaged:
        claims[0].check(False, damage)
    claims[0].wrong = listed
    found = {"schema_version": 1, "run": path.name, "train_steps": files.last_step}
    content: dict[str, Any] = {**found, "claims": [claim.to_json() for claim in claims]}
    replace_text(path / AUDIT, json.dumps(content, indent=1) + "\n")
    return claims, path / AUDIT


def _claims(files: RunFiles, check_all: bool, progress: Callable[..., None]) -> Iterator[Claim]:
    yield from _guarded(account_claims, files)
    num_trajectories = 0

    def counted() -> Iterator[SampledGroup]:
        nonlocal num_trajectories
        for group in files.groups():
            num_trajectories += len(group.samples)
            yield group

    groups = counted()
    yield from _guarded(sample_claims, files, groups)
    deque(groups, maxlen=0)  # those that a damage has left unread
    progress("checking the seals")
    yield from _guarded(seal_claims, files)
    yield from _guarded(
        partial(logprob_claims, check_all=check_all, progress=progress), files, num_trajectories
    )


def _guarded(make: Callable[..., Iterator[Claim]], *given: Any) -> Iterator[Claim]:
    """A file that lacks what it must have fails the audit; it does not end it."""
    try:
        yield from make(*given)
    except Exception as error:  # damaged files may raise anything, also in the libraries that open them
        claim = Claim("contents", "the run's files have what they must have")
        claim.check(False, f"a file lacks or misstates something: {error!r}")
        yield claim
