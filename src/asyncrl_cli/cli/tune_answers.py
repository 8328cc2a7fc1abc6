"""`asyncrl tune --what-if` and `--scale`: what single changes would do, which resource limits, and how the
speed grows with GPUs; printed, all SIMULATED, and drawn as a page."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from asyncrl_cli.base.errors import ConfigError, RefusedError
from asyncrl_cli.cli.console import figures_table, print_json, print_prose, print_whole, say, stderr, warn
from asyncrl_cli.cli.options import MOST_DEVICES

if TYPE_CHECKING:
    from asyncrl_cli.bench.effects import Scaling
    from asyncrl_cli.bench.recommendation import TuneRequest
    from asyncrl_cli.bench.what_if import WhatIf

MODES = (
    "colocate",
    "on-policy-pipeline",
    "stream-off-policy",
    "one-step-off",
    "stale-samples",
    "partial-rollout",
)
LEAST_CHANGE = 0.005


def answer(asked: TuneRequest, scale: str | None, out: Path | None, *, what_if: bool, as_json: bool) -> None:
    """Answer `--scale` or `--what-if`. Raises ConfigError for an option that has no effect then."""
    from asyncrl_cli.bench.what_if import scalings
    from asyncrl_cli.bench.what_if import what_if as simulate_changes
    from asyncrl_cli.observe.screen import ProgressLine

    question = "--what-if" if scale is None else "--scale"
    unused: dict[str, object] = {"--max-staleness": asked.bound, "--out": out}
    if scale is not None:
        unused = {"--max-staleness": asked.bound, "--gpus": asked.gpus, "--what-if": what_if or None}
    for flag in (flag for flag, value in unused.items() if value is not None):
        raise ConfigError(f"{flag} has no effect with {question}", hint=f"leave out {flag} or {question}")
    if scale is None:
        with ProgressLine("auto", stderr()) as progress:
            found = simulate_changes(asked, progress)
        print_json(found.to_json()) if as_json else _print_effects(found)
        return
    gpus = _numbers(scale)
    if out is not None:
        check_new(out, ".html")
    profiles = [asked.profile] if asked.profile else MODES
    with ProgressLine("auto", stderr()) as progress:
        scaled = scalings(asked, profiles, gpus, progress)
    if out is not None:
        from asyncrl_cli.report.scaling import scaling_page

        out.write_text(scaling_page(asked.reference, scaled), encoding="utf-8")
        say(f"wrote {out}")
    if as_json:
        print_json({"simulated": True, "scalings": [one.to_json() for one in scaled]})
    else:
        _print_scalings(asked.reference, scaled)


def check_new(path: Path, suffix: str) -> None:
    """Raises ConfigError or RefusedError unless `path` can be written, with that suffix."""
    if path.suffix != suffix:
        hint = f"--out {path.with_suffix(suffix)}"
        raise ConfigError(f"--out {path}: the file has to end in {suffix}", hint=hint)
    if path.exists():
        others = (path.with_name(f"{path.stem}-{number}{suffix}") for number in count(2))
        free = next(other for other in others if not other.exists())
        raise RefusedError(f"{path} exists and is not overwritten", hint=f"--out {free}")
    if not path.parent.is_dir():
        raise RefusedError(f"there is no directory {path.parent}", hint=f"--out {path.name}")


def _numbers(scale: str) -> list[int]:
    """The ascending numbers of GPUs in "32,64". Raises ConfigError."""
    parts = [part.strip() for part in scale.split(",")]
    numbers = sorted({int(part) for part in parts if part.isdecimal()})
    if len(numbers) < 2 or len(numbers) < len(parts) or not 1 <= numbers[0] <= numbers[-1] <= MOST_DEVICES:
        what = f"--scale {scale} is no list of at least two numbers of GPUs, each up to {MOST_DEVICES:,}"
        raise ConfigError(what, hint="--scale 32,64,128,256,512")
    return numbers


def _print_effects(found: WhatIf) -> None:
    from asyncrl_cli.bench.space import HEADINGS

    first, *others = found.effects
    what = "in brackets, 90% intervals without the model's own error"
    print_prose(f"SIMULATED: {found.workload.name}, {found.profile}; {what}")
    setting = (f"{heading} {getattr(found.setting, name)}" for heading, name in HEADINGS.items())
    print_prose(f"as it is: {', '.join(setting)}")
    print_prose(
        f"{first.groups_per_s} groups/s, {first.staleness} versions of staleness, "
        f"{first.cost_s} device s per group"
    )
    print_prose(f"limited by {found.limit}\n")
    table = figures_table(("change", "groups/s", "staleness", "device s per group"))
    for effect in sorted(others, key=lambda effect: effect.change.is_resource):
        name = effect.change.label
        if (ratio := effect.ratio) is None:
            warn(f"{name} could not be simulated and is left out: {effect.error}")
            continue
        if effect.change.is_resource:
            name = f"without the {name}" if name.startswith("tail") else f"twice: {name}"
        low, high = f"{ratio.low - 1:+.1%}", f"{ratio.high - 1:+.1%}"
        is_same = abs(ratio.value - 1) < LEAST_CHANGE
        change = "the same" if is_same else f"{ratio.value - 1:+.1%} [{low}..{high}]"
        table.add_row(name, change, str(effect.staleness), str(effect.cost_s))
    print_whole(table)
    if notes := found.workload.notes.strip():
        print_prose(f"\nnotes of the workload {found.workload.name}\n{notes}")


def _print_scalings(name: str, scaled: list[Scaling]) -> None:
    from asyncrl_cli.bench.effects import PAYS

    print_prose(
        f"SIMULATED: {name}, the same batch on more GPUs; linearity: against the fewest. More pay if twice "
        f"as many make at least {PAYS:g} times as many groups per second\n"
    )
    table = figures_table(("profile", "GPUs", "groups/s", "linearity", "GPU s per group"))
    for one in scaled:
        for gpus, effect, linearity in zip(one.gpus, one.effects, one.linearity, strict=True):
            if linearity is None:
                warn(f"{one.profile} on {gpus} GPUs is left out: {effect.error}")
                continue
            figures = str(effect.groups_per_s), f"{linearity:.2f}", str(effect.cost_s)
            table.add_row(one.profile if gpus == one.gpus[0] else "", str(gpus), *figures)
    print_whole(table)
    print_prose("")
    for one in scaled:
        print_prose(f"{one.profile}: {one}")
