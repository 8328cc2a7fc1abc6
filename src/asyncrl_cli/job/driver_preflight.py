"""Examines the nodes of a cluster before a run loads anything there: what they have in common with the
driver, and what they see. Runs in the driver; node_probe.py runs on the nodes.

    probes on all nodes at once ─> NodeFacts of each ─> findings: a line per node or problem, with a remedy

The checks are functions of facts. Nothing here blocks the event loop, and every wait is bounded.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle, ActorMethod
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from asyncrl_cli.base.errors import AsyncrlError, PreflightError, counted
from asyncrl_cli.job import node_probe
from asyncrl_cli.job.ray.calls import Limit, answer
from asyncrl_cli.job.ray.placement import ray_cluster
from asyncrl_cli.job.ray.session import connected
from asyncrl_cli.models.gguf_file import SUFFIX as GGUF
from asyncrl_cli.models.model_directory import BUILTIN, is_on_hub, teacher_key
from asyncrl_cli.plan.cluster import node_lines
from asyncrl_cli.plan.machine import GIB, LEAST_SHARED_MEMORY_BYTES, Finding
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.weights.directory import packages_of

ALIKE = "asyncrl", "ray", "torch", "transformers"
"""Packages whose objects travel between the nodes, or whose numbers must be the same on all."""
LOOK_LIMIT, DOWNLOAD_LIMIT = Limit(120.0), Limit(3600.0)
"""A probe's process starts in a second or two, on a busy node much later."""
REACH_S = 10.0
MOST_SKEW_S = 5.0
"""If clocks differ by more, logs of two nodes are hard to read together, and files of one are in the future
of the other."""

Problem = tuple[str, bool | None, str]
"""What was found on a node, `Finding.ok` and a hint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What a probe found. `error`: why it gave no answer. `ahead_s`: its clock minus the driver's.
    `directory_error`, `unreached`: why the run's directory cannot be used, or the first node cannot be
    reached, from there; "" if it can. `not_fetched`: why missing models could not be downloaded there, by
    key."""

    address: str
    error: str = ""
    python: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    shared_memory_bytes: int = 0
    directory_error: str = ""
    missing_models: Sequence[str] = ()
    not_fetched: Mapping[str, PreflightError] = field(default_factory=dict)
    interfaces: Sequence[str] = ()
    own_address: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    ahead_s: float = 0.0
    unreached: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What every node must have: packages as here, the run's directory, and the models' directories (by key).
    `downloads`: hub names of models that a node may fetch itself; `builtin`: the keys of models that asyncrl
    has made."""

    directory: Path
    packages: Sequence[str] = ALIKE
    models: Mapping[str, str] = field(default_factory=dict)
    downloads: Mapping[str, str] = field(default_factory=dict)
    builtin: Collection[str] = ()
    trust_remote_code: bool = False

    @classmethod
    def of(cls, profile: Profile, model_dir: Path, further: Mapping[str, Any], directory: Path) -> Wanted:
        """`further`: what `further_models` found."""
        models = {"model.path": str(model_dir.absolute())}
        models |= {name.replace("_dir", ".path"): further[name] for name in further if name != "teacher_dirs"}
        names = {key: attrgetter(key)(profile) or profile.model.path for key in models}
        models |= {teacher_key(name): path for name, path in further.get("teacher_dirs", {}).items()}
        names |= {teacher_key(name): path for name, path in profile.teacher.paths.items()}
        return cls(
            directory=directory,
            packages=tuple(
                dict.fromkeys((*ALIKE, profile.rollout.engine, *packages_of(profile.weights.url)))
            ),
            models=models,
            downloads={key: name for key, name in names.items() if is_on_hub(name)},
            builtin={key for key, name in names.items() if name.startswith(BUILTIN) or name.endswith(GGUF)},
            trust_remote_code=profile.model.trust_remote_code,
        )


async def examined(nodes: Mapping[str, str], wanted: Wanted, say: Callable[[str], None]) -> list[Finding]:
    """Findings about all `nodes` (id -> address)."""
    say(f"examining {len(nodes)} nodes" if len(nodes) > 1 else "examining the node")
    here = await asyncio.to_thread(node_probe.Probe().look, wanted.packages, "", "", {})
    return list(findings(NodeFacts(address="here", **here), await gathered(nodes, wanted, say), wanted))


def cluster_findings(address: str, directory: Path, say: Callable[[str], None]) -> list[Finding]:
    """Findings about all nodes of a cluster, for runs in `directory` or, if it is missing, in its nearest
    existing parent."""
    say(f"connecting to {address}")
    places = (directory.absolute(), *directory.absolute().parents)
    directory = next(place for place in places if place.is_dir())
    with connected(address) as cluster:
        free = ray_cluster(free=True)
        about = Finding("cluster", f"{cluster}:{node_lines(cluster, free)}", True)
        nodes = {node.id: node.name for node in cluster.nodes}
        return [about, *asyncio.run(examined(nodes, Wanted(directory=directory), say))]


def refuse(found: Sequence[Finding]) -> list[str]:
    """Returns the findings' warnings. Raises one PreflightError for all findings that forbid a run."""
    if wrong := [finding for finding in found if finding.ok is False]:
        lines = "".join(f"\n  - {finding.what}: {finding.found}" for finding in wrong)
        hint = "\n".join(dict.fromkeys(finding.hint for finding in wrong))
        what = f"{counted(len(wrong), 'problem')} on the nodes of the cluster"
        raise PreflightError(f"{what}:{lines}", hint=hint)
    return [f"{finding.what}: {finding.found} ({finding.hint})" for finding in found if finding.ok is None]


def findings(here: NodeFacts, there: Sequence[NodeFacts], wanted: Wanted) -> Iterator[Finding]:
    """The problems of each node, or that it has none. `ok` is None for a problem that a run can live with."""
    is_apart = len({facts.address for facts in there}) > 1
    for facts in there:
        problems: list[Problem] = []
        if facts.error:
            problems += [(facts.error, False, "`ray status` and the node's raylet.err may say why")]
        else:
            problems += [*_versions(here, facts), *_files(facts, wanted)]
            problems += _network_clock_and_memory(facts, is_apart=is_apart)
        if not problems:
            versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
            free = f"{facts.shared_memory_bytes / GIB:.1f} GiB free in /dev/shm"
            yield Finding(facts.address, f"python {facts.python}, {versions}; {free}", True)
        for found, ok, hint in problems:
            yield Finding(facts.address, found, ok, hint)


def _versions(here: NodeFacts, there: NodeFacts) -> Iterator[Problem]:
    """Patch versions of Python, and builds of a package (2.13.0+cpu), may differ."""
    minor = [".".join(facts.python.split(".")[:2]) for facts in (here, there)]
    pairs = {"python": (minor[0], minor[1])}
    for name, version in here.versions.items():
        if version:
            pairs[name] = version.split("+")[0], there.versions.get(name, "").split("+")[0]
    for name, (ours, theirs) in pairs.items():
        if ours != theirs:
            found = f"{name} {theirs or 'is missing'}, and {ours} on the driver's node"
            yield found, False, f"{name} {ours} in the environment of that node's `ray start`"


def _files(there: NodeFacts, wanted: Wanted) -> Iterator[Problem]:
    if there.directory_error:
        found = f"it does not see what the driver writes to {wanted.directory}, or cannot write there"
        hint = "--runs-dir on a file system that all nodes mount at the same path"
        yield f"{found} ({there.directory_error})", False, hint
    for key in there.missing_models:
        hint = f"a path below a file system that all nodes share: --set {key}=..."
        if key in wanted.downloads:
            hint = "HF_HOME on a file system that all nodes share, or at the same path on each"
        elif key in wanted.builtin:
            hint = "a directory of a file system that all nodes share: --set model.cache_dir=..."
        yield f"{key}: there is no {wanted.models[key]}", False, hint
    for key, error in there.not_fetched.items():
        why = error.message.removeprefix(f"the probe on {there.address}: model.path: ")
        yield f"{key}: {wanted.downloads[key]} cannot be downloaded there: {why}", False, error.hint


def _network_clock_and_memory(there: NodeFacts, *, is_apart: bool) -> Iterator[Problem]:
    if there.unreached:
        hint = "open all ports between the nodes: Ray's workers, gloo and NCCL take any that is free"
        yield f"it cannot reach {there.unreached}", False, hint
    known = ", ".join(name for name in there.interfaces if name != "lo")
    for variable, value in there.variables.items():
        wanted = [one.split(":")[0] for one in value.lstrip("^=").split(",")]
        is_there = any(name.startswith(prefix) for prefix in wanted for name in there.interfaces)
        if not value.startswith("^") and not is_there:
            found = f"{variable}={value}, but there is no such interface"
            yield found, False, f"its interfaces are {known}"
    if is_apart and there.own_address.startswith("127.") and "GLOO_SOCKET_IFNAME" not in there.variables:
        why = f"its host name resolves to {there.own_address}: gloo would listen there"
        hint = f"GLOO_SOCKET_IFNAME={known} in the environment of its `ray start`"
        yield f"{why}, where other nodes cannot reach it", False, hint

    if abs(there.ahead_s) > MOST_SKEW_S:
        direction = "ahead of" if there.ahead_s > 0 else "behind"
        found = f"its clock is {abs(there.ahead_s):.0f} s {direction} the driver's"
        yield found, None, "run chrony or ntpd on all nodes"
    if there.shared_memory_bytes < LEAST_SHARED_MEMORY_BYTES:
        free = f"{there.shared_memory_bytes / 2**20:.0f} MiB free in /dev/shm"
        hint = "docker run --shm-size=8g, or a memory-backed emptyDir at /dev/shm"
        yield f"{free}: Ray keeps its objects on disk then", None, hint


def ahead_s(asked_s: float, clock_s: float, answered_s: float) -> float:
    """By how much another clock is at least ahead (negative: behind), given its answer between two readings
    of this one; else 0."""
    return max(clock_s - answered_s, 0.0) or min(clock_s - asked_s, 0.0)


async def gathered(nodes: Mapping[str, str], wanted: Wanted, say: Callable[[str], None]) -> list[NodeFacts]:
    """Facts about all nodes, from one probe on each. The others try to reach the first node."""
    async with token_in(wanted.directory) as token:
        with _probes(nodes) as probes:
            first, *others = nodes
            meeting = None
            with suppress(AsyncrlError):  # its own facts say what is wrong with it
                meeting = nodes[first], await _ask(probes[first].listen, nodes[first])
            looks = [_facts(probes[first], nodes[first], wanted, token, None, say)]
            looks += [_facts(probes[node], nodes[node], wanted, token, meeting, say) for node in others]
            return await asyncio.gather(*looks)


async def _facts(
    probe: ActorHandle,
    address: str,
    wanted: Wanted,
    token: str,
    meeting: tuple[str, int] | None,
    say: Callable[[str], None],
) -> NodeFacts:
    """Facts about one node. It downloads the models that it may fetch itself. `meeting`: the first node's
    address and port."""
    directory = str(wanted.directory.absolute())
    try:
        seen = await _ask(probe.look, address, wanted.packages, directory, token, wanted.models)
        facts = NodeFacts(address=address, **seen)
        asked_s = time.time()
        facts = replace(facts, ahead_s=ahead_s(asked_s, await _ask(probe.clock, address), time.time()))
        if meeting is not None:
            facts = replace(facts, unreached=await _ask(probe.reach, address, *meeting, REACH_S))
        missing, not_fetched = list[str](), dict[str, PreflightError]()
        for key in facts.missing_models:
            fetched, name = "", wanted.downloads.get(key)
            try:
                if name:
                    say(f"downloading {name} to {address}")
                    trust = wanted.trust_remote_code
                    fetched = await _ask(probe.fetch, address, name, trust, limit=DOWNLOAD_LIMIT)
                if fetched != wanted.models[key]:
                    missing.append(key)
            except PreflightError as error:  # the download failed
                not_fetched[key] = error
        return replace(facts, missing_models=missing, not_fetched=not_fetched)
    except AsyncrlError as error:
        return NodeFacts(address=address, error=error.message)


async def _ask(method: ActorMethod, address: str, *args: object, limit: Limit = LOOK_LIMIT) -> Any:
    executor = f"the probe on {address}"
    return await answer(method.remote(*args), executor=executor, call="its examination", limit=limit)


@contextmanager
def _probes(nodes: Mapping[str, str]) -> Iterator[dict[str, ActorHandle]]:
    """An actor on each node. It requests no CPU, because the job may have reserved them all."""
    ray.cloudpickle.register_pickle_by_value(node_probe)
    try:
        probe = ray.remote(num_cpus=0)(node_probe.Probe)
        on = {node: NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes}
        made = {node: probe.options(scheduling_strategy=on[node]).remote() for node in nodes}
    finally:
        ray.cloudpickle.unregister_pickle_by_value(node_probe)
    try:
        yield made
    finally:
        for actor in made.values():
            ray.kill(actor)


@asynccontextmanager
async def token_in(directory: Path) -> AsyncIterator[str]:
    """A file for the nodes to read, with its name as content. Removed afterwards, with the files that they
    wrote beside it."""
    token = f".preflight-{secrets.token_hex(8)}"

    def remove() -> None:
        for path in directory.glob(f"{token}*"):
            path.unlink(missing_ok=True)

    try:
        await asyncio.to_thread((directory / token).write_text, token, encoding="ascii")
        yield token
    finally:
        await asyncio.to_thread(remove)
