"""`asyncrl init` for clusters: writes the files with which SLURM, KubeRay, SkyPilot or Ray's cluster launcher
start a run.

    profile ─> nodes that hold its job ─> values ─> each `{{name}}` in a template's files

An option is refused if no file of the template uses its value, or if it is missing and a file needs its
value.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path

from asyncrl_cli.base.errors import ConfigError, PreflightError
from asyncrl_cli.checkpoint.run_directory import stem_of
from asyncrl_cli.cli.submit import set_words
from asyncrl_cli.plan.cluster import ClusterResources, planned_nodes
from asyncrl_cli.plan.compiler import asked_gpus, compile_job
from asyncrl_cli.plan.job_plan import ROLLOUT, TRAINER, JobPlan
from asyncrl_cli.profile.loaded import Loaded, load
from asyncrl_cli.profile.schema import Profile

LAUNCHERS = "kuberay", "ray-cluster", "skypilot", "slurm"
GPUS_PER_NODE = 8
VARIABLE = re.compile(r"\{\{(\w+)\}\}")
NAME = re.compile(r"[a-z]([a-z0-9-]{0,45}[a-z0-9])?")
"""Names that Kubernetes accepts for a RayJob. All other launchers accept them, too."""
PLAIN = re.compile(r"[\w./:@+-]+")
"""Text that needs no quotes in a shell or in YAML."""
DAEMONS_CPUS = 2
"""CPUs of a pod in addition to those of its processes."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What is launched, and where: the options of `asyncrl init` by name; None for an option that is not
    given."""

    profile: str | None
    image: str | None
    set: Sequence[str] | None
    name: str | None
    shared: Path | None
    nodes: int | None
    gpus_per_node: int | None

    @cached_property
    def loaded(self) -> Loaded:
        """The profile. This shell's ASYNCRL_* variables are ignored: the job will not have them."""
        names = {} if self.name is None else {"run.name": self.name}
        return load(str(self.profile), self.set or [], names, environ={})

    @property
    def run(self) -> str:
        return self.loaded.profile.run.name or stem_of(self.loaded.profile.name)

    @property
    def directory(self) -> Path:
        """The directory that all nodes see."""
        return (self.shared or Path()).absolute()

    @property
    def gpus(self) -> int:
        """The maximum per node."""
        return self.gpus_per_node or GPUS_PER_NODE


def rendered(template: Path, launch: Launch) -> dict[str, str]:
    """The launcher's files by name; empty for a template that is copied unchanged. Raises ConfigError if
    template, options and profile do not go together, and PreflightError if there are too few nodes."""
    launcher = template.name
    if launcher not in LAUNCHERS:
        for name in (name for name, value in vars(launch).items() if value is not None):
            what = f"the template {launcher} is copied unchanged: --{name.replace('_', '-')} is not used"
            hint = f"leave it out, or use a template for clusters: {', '.join(LAUNCHERS)}"
            raise ConfigError(what, hint=hint)
        return {}
    if launch.profile is None:
        hint = "--profile NAME|FILE, as for `asyncrl train`"
        raise ConfigError(f"{launcher} needs a profile to train", hint=hint)
    texts = {path.name: path.read_text(encoding="utf-8") for path in sorted(template.iterdir())}
    named = {name for text in texts.values() for name in VARIABLE.findall(text)}
    by_role = "trainer_nodes" in named
    placement = launch.loaded.profile.placement
    if not NAME.fullmatch(launch.run):
        rule = "use at most 47 lower-case letters, digits and hyphens, a letter first"
        what = f"not every cluster accepts the job name '{launch.run}': {rule}"
        raise ConfigError(what, hint="--name my-run")
    for option, value in (("--shared", str(launch.directory)), ("--image", launch.image or "-")):
        if not PLAIN.fullmatch(value):
            what = f"{option} {value}: spaces and quotes are not allowed here"
            raise ConfigError(what, hint="use another path or name")
    if launch.image is None and "image" in named:
        what = f"{launcher} starts containers and needs an image"
        raise ConfigError(what, hint="--image REGISTRY/NAME:TAG")
    if launch.image is not None and "image" not in named:
        raise ConfigError(f"{launcher} starts no containers: --image is not used", hint="leave --image out")
    if by_role and launch.nodes is not None:
        what = f"{launcher} has pods for each role: --nodes is not used"
        raise ConfigError(what, hint="--gpus-per-node N limits the GPUs of one pod")
    if by_role and (placement.trainer_labels or placement.rollout_labels):
        keys = "placement.trainer_labels and placement.rollout_labels"
        what = f"{launcher} has pods for each role, and sets {keys} itself"
        raise ConfigError(what, hint="leave them out of the profile")
    nodes, plan = _fewest(launch.loaded.profile, launch.gpus, launch.nodes)
    values = _values(launch, nodes, plan)
    return {file: VARIABLE.sub(lambda match: str(values[match[1]]), text) for file, text in texts.items()}


def _fewest(profile: Profile, gpus_per_node: int, nodes: int | None) -> tuple[int, JobPlan]:
    """The smallest number of equal nodes that holds the job (or `nodes`, if given), and the job's plan
    there."""
    asked = asked_gpus(profile)
    least = -(-asked // gpus_per_node) or 1
    refusals: list[PreflightError] = []
    for number in range(least, max(asked, least) + 1) if nodes is None else (nodes,):
        cluster = ClusterResources(nodes=tuple(planned_nodes(profile, number, gpus_per_node)))
        try:
            plan = compile_job(profile, cluster)
        except PreflightError as error:
            refusals.append(error)
            continue
        if plan.gpus:
            return number, plan
        what = "the profile computes on CPUs and asks for no GPU, but launchers count GPUs"
        hint = "--set placement.device=cuda, or --set placement.gpu_bundles=true for a rehearsal on CPUs"
        raise ConfigError(what, hint=hint)
    raise refusals[0]


def _values(launch: Launch, nodes: int, plan: JobPlan) -> dict[str, object]:
    runs_dir = launch.directory / "runs"
    run = ["--profile", str(launch.profile), *set_words(launch.set), "--name", launch.run]
    run += ["--runs-dir", str(runs_dir)]
    values: dict[str, object] = {
        "name": launch.run,
        "nodes": nodes,
        "num_workers": nodes - 1,
        "workers": ", ".join(f"NODE-{index}" for index in range(2, nodes + 1)),
        "gpus": launch.gpus,
        "image": launch.image,
        "ray": metadata.version("ray"),
        "shared": launch.directory,
        "runs_dir": runs_dir,
        "train": shlex.join(["asyncrl", "train", *run, "--resume", "auto", "--ui", "plain"]),
        "submit": shlex.join(["asyncrl", "submit", *run]),
        "rollout_labels": "{}" if plan.colocate else '{group = "rollout"}',
    }
    # Two kinds of pods: for trainer, scorers and colocated rollout workers, and for other rollout workers.
    # Pods of one kind have the same number of GPUs.
    for role in (TRAINER, ROLLOUT):
        names = [name for name in plan.groups if (name == ROLLOUT) == (role == ROLLOUT)]
        bundles = [bundle for name in names for bundle in plan.groups[name]]
        spread = [name for name in names if plan.spot(name).strategy == "strict_spread"]
        apart = sum(len(plan.groups[name]) for name in spread)
        largest = max((bundle.gpus for bundle in bundles), default=1) or 1  # each bundle is within one pod
        total = -(-sum(bundle.gpus for bundle in bundles) // largest)  # in units of the largest
        pods = max(-(-total // max(launch.gpus // largest, 1)), apart)
        share = -(-total // max(pods, 1))
        cpus = share * largest * launch.loaded.profile.placement.cpus_per_worker * (2 if plan.colocate else 1)
        values |= {f"{role}_nodes": pods, f"{role}_gpus": share * largest}
        values[f"{role}_cpus"] = DAEMONS_CPUS + cpus
    return values
