"""The resolved profile of a run: written, read back, and changed when the run is resumed.

It is written as `config.resolved.json` (every value with its origin), and as TOML for people:

    {"schema_version": 1,
     "profile": {"run": {"train_steps": 200, ...}, ...},
     "origins": {"run.seed": "--set", ...}}

In the JSON, eta is a string, so that it stays an exact decimal.

`asyncrl resume --set`: a resumed run may compute elsewhere and with other numbers of workers, but it stays
the same run. Keys may change if they say where and how the run computes, what it writes, or how long it
waits. So may the learning rates, for a run that diverges, and the run's length, which can only grow. All
other keys determined what the checkpoint holds (weights, groups, their deadlines), so changing them is
refused with that reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path

from pydantic import ValidationError

from asyncrl_cli.base.errors import ConfigError, RefusedError, combine
from asyncrl_cli.base.safe_files import first_problem, load_json
from asyncrl_cli.profile.arithmetic import train_steps_of
from asyncrl_cli.profile.check import check
from asyncrl_cli.profile.keys import PARAMS, entries_of, keys, sections
from asyncrl_cli.profile.loaded import DEFAULT, Layer, Loaded, is_default, merge, set_layer
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.profile.toml_files import Table, Values, toml_key, toml_value
from asyncrl_cli.profile.validation import validate

SCHEMA_VERSION = 1
"""The format version of `config.resolved.json`."""
MAY_CHANGE = frozenset({
    "placement", "data_plane", "weights", "checkpoint", "gateway", "logging",
    "run.train_steps", "run.total_rollout_steps", "run.stop_grace_s", "run.stall_timeout_s", "run.ship",
    "trainer.lr", "critic.lr",
    "trainer.max_tokens_per_microbatch", "trainer.activation_checkpointing", "trainer.max_skipped_steps",
    "trainer.offload_optimizer", "trainer.whole_gradients", "trainer.sequence_parallel_size",
    "trainer.shared_prefixes", "trainer.meeting_timeout_s", "trainer.step_timeout_s",
    "trainer.nnodes", "trainer.n_gpus_per_node", "rollout.nnodes", "rollout.n_gpus_per_node",
    "rollout.engine", "rollout.urls", "rollout.token_file",
    "rollout.workers", "rollout.slots", "rollout.placement", "rollout.prefetch_groups",
    "rollout.hold_slots", "rollout.interrupt", "rollout.tensor_parallel_size",
    "rollout.gpu_memory_utilization", "rollout.max_model_len", "rollout.enforce_eager", "rollout.engine_args",
    "rollout.call_timeout_s", "rollout.max_restarts", "rollout.min_workers",
    "env.tool_timeout_s", "env.episode_timeout_s", "eval.every_versions", "eval.timeout_s",
    "task.reward_timeout_s", "task.reward_workers", "task.max_failed_ratio", "task.python",
    "algorithm.max_num_gen_batches", "async_training.max_requeues", "async_training.on_exhausted",
    "async_training.target_kl",
})  # fmt: skip
"""Keys that may change, and sections in which every key may change except those in `FIXED`."""
FIXED = {
    "placement.colocate": "it decided how the checkpoint's groups were admitted",
    "run": "the order of the prompts follows from it",
    "model": "the checkpoint's weights are that model's",
    "lora": "the checkpoint's weights are those of its adapters",
    "task": "the checkpoint's groups were made and rewarded by it",
    "env": "the checkpoint's groups were made within it",
    "rollout": "the checkpoint's responses were sampled with it",
    "async_training": "the checkpoint's groups were admitted under it, and their deadlines follow from it",
    "eval": "later evals could not be compared with earlier ones",
}
"""Why a key, or the rest of a section, cannot change."""
ANOTHER = "take another checkpoint"
ELSE = "the steps before the checkpoint were trained with it"


def to_document(profile: Profile, origins: Mapping[str, str]) -> Table:
    """The content of `config.resolved.json`, from which `from_document` restores the same profile and
    origins."""
    return {
        "schema_version": SCHEMA_VERSION,
        "profile": profile.model_dump(mode="json"),
        "origins": dict(origins),
    }


def read_document(path: Path) -> Loaded:
    """Read `config.resolved.json`. Raises RefusedError if it has another schema version or does not describe
    a profile."""
    is_of_run = (path.parent / "checkpoints").is_dir()
    hint = "each checkpoint of the run has a copy of it" if is_of_run else ANOTHER
    return from_document(load_json(path, Table, hint=hint), where=str(path), hint=hint)


def from_document(document: Values, *, where: str = "config.resolved.json", hint: str = ANOTHER) -> Loaded:
    """Raises RefusedError if the document has another schema version or does not describe a profile."""
    version = document.get("schema_version")
    if version != SCHEMA_VERSION:
        why = f"{where} has schema_version {version!r:.40}; this asyncrl reads {SCHEMA_VERSION}"
        raise RefusedError(why, hint="resume with the version of asyncrl that started the run")
    try:
        tables, origins = document["profile"], document["origins"]
        training = tables["async_training"]
        exact = {**training, "staleness_threshold": Decimal(training["staleness_threshold"])}
        profile = Profile.model_validate({**tables, "async_training": exact})
        for section, _, name in (key.partition(".") for key in origins if key in keys()):
            if name not in tables.get(section, {}):
                raise ConfigError(f"{section}.{name} is missing")
        check(profile)
        return Loaded(profile=profile, origins={str(key): str(origin) for key, origin in origins.items()})
    except ValidationError as error:
        why = first_problem(error)
    except ConfigError as error:
        why = error.message
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        why = f"{type(error).__name__} {error}"
    raise RefusedError(f"{where} does not describe a profile: {why}", hint=hint)


def to_toml(
    profile: Profile, origins: Mapping[str, str], *, only_given: bool = True, with_origins: bool = False
) -> str:
    """A self-contained profile file with the values that some layer gave or, with `only_given=False`, every
    value that is set."""
    tables: dict[str, list[str]] = {section: [] for section in sections()}
    for key, value in entries_of(profile).items():
        section, _, name = key.partition(".")
        if key.startswith(f"{PARAMS}."):
            name = f"params.{toml_key(key.removeprefix(f'{PARAMS}.'))}"
        origin = origins.get(key, DEFAULT)
        if value not in (None, {}) and not (only_given and is_default(origin)):
            text = f"{name} = {toml_value(value)}"
            tables[section].append(f"{text:<48}  # {origin}" if with_origins else text)
    lines = [f"name = {toml_value(profile.name)}", f"purpose = {toml_value(profile.purpose)}"]
    for section, entries in tables.items():
        lines += ["", f"[{section}]", *entries] if entries else []
    return "\n".join(lines) + "\n"


def changed(loaded: Loaded, sets: Sequence[str]) -> Loaded:
    """The profile of a resumed run, changed by `--set`. Raises ConfigError for keys that cannot change or for
    other mistakes."""
    if not sets:
        return loaded
    before, after = loaded.profile, laid_over(loaded, sets, "--set (resume)")
    profile, problems = after.profile, []
    for key in differing(before, profile):
        if not may_change(key):
            why = FIXED.get(key) or FIXED.get(key.partition(".")[0]) or ELSE
            hint = "start another run for that (`asyncrl export`, then --set model.path=...), or leave it out"
            problems.append(ConfigError(f"{key} cannot change in a resumed run: {why}", hint=hint))
    steps, steps_before = train_steps_of(profile), train_steps_of(before)
    if steps < steps_before:
        shorter = f"a resumed run cannot become shorter: {steps} train steps, after {steps_before}"
        hint = "`asyncrl stop` ends a run before its last step, with a checkpoint"
        problems.append(ConfigError(shorter, hint=hint))
    if problems:
        raise combine(problems)
    warnings, schedule = [*after.warnings], profile.trainer.lr_schedule
    if schedule != "constant" and steps != steps_before:
        rises = "so the learning rate rises with this resume"
        warnings.append(f"trainer.lr_schedule = {schedule} now falls to zero at step {steps}, {rises}")
    return Loaded(profile=profile, origins=after.origins, warnings=tuple(warnings))


def may_change(key: str) -> bool:
    """Whether a resumed run may have another value."""
    return key not in FIXED and not MAY_CHANGE.isdisjoint((key, key.partition(".")[0]))


def laid_over(loaded: Loaded, sets: Sequence[str], origin: str) -> Loaded:
    """A run's profile with `--set`s on top, whatever their keys. Raises ConfigError for mistakes."""
    before, layer = loaded.profile, set_layer(sets)
    values = {"name": before.name, "purpose": before.purpose, **entries_of(before)}
    profile = validate(*merge([Layer(origin="default", values=values, origins=loaded.origins), layer]))
    origins = {**loaded.origins} | dict.fromkeys(layer.values, origin)
    return Loaded(profile=profile, origins=origins, warnings=tuple(check(profile)))


def differing(before: Profile, after: Profile) -> Table:
    """The keys whose values differ, with the later values (None where the key is gone)."""
    old, new = entries_of(before), entries_of(after)
    return {key: new.get(key) for key in new | old if new.get(key) != old.get(key)}
