"""A profile's dotted keys, like `run.seed`: their names, flattening tables to them, and the keys that unknown
ones probably mean.

Keys of other trainers and their counterparts here are read from the tables of docs/coming-from.md, a page
that comes with asyncrl:

    ## verl
    | there | here | what differs |
    |---|---|---|
    | `data.val_files` | `eval.sets`, `task.eval_path` | sets by name; or one file instead |
    | `data.gen_batch_size` | | groups are always admitted one by one |

Keys with the same last part and the same meaning in both are not listed: the hint names the nearest known key
anyway. A row of `section.*` is for all keys of that section that have no row of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import NamedTuple

from asyncrl_cli.base.errors import MOST_PROBLEMS, ConfigError, combine, did_you_mean, nearest
from asyncrl_cli.profile.fields import Section
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.profile.toml_files import Table, Value, Values, shipped_directory, shortened

PARAMS = "task.params"
"""The only table with free keys: each entry counts as a key, `task.params.<name>`."""


HEADER = "\n| there | here | what differs |\n|---|---|---|\n"
OTHERS = "Other names"
"""The section of names that belong to no trainer."""


@cache
def sections() -> Mapping[str, type[Section]]:
    kinds = {name: field.annotation for name, field in Profile.model_fields.items()}
    return {
        name: kind for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Section)
    }


@cache
def keys() -> Mapping[str, str]:
    """Every dotted key with its help on one line, in the order of the schema."""
    return {
        f"{section}.{key}": " ".join((field.description or "").split())
        for section, kind in sections().items()
        for key, field in kind.model_fields.items()
    }


def values_of(profile: Profile) -> Table:
    """Every key with its value."""
    return {f"{section}.{name}": value for section in sections() for name, value in getattr(profile, section)}


def of_lent(profile: Profile) -> Profile:
    """The profile of a worker on the trainer's devices (`placement.lend`). To its engine, it is colocated:
    it sleeps, and leaves a rank's memory alone, on one device."""
    one = {"placement.gpus_per_rollout_worker": 1, "rollout.tensor_parallel_size": None}
    return with_values(profile, {"placement.colocate": True, **one})


def with_values(profile: Profile, values: Values) -> Profile:
    """The profile with other values, by dotted key. They are not validated."""
    for key, value in values.items():
        section, _, name = key.partition(".")
        changed = getattr(profile, section).model_copy(update={name: value})
        profile = profile.model_copy(update={section: changed})
    return profile


def entries_of(profile: Profile) -> Table:
    """Every key with its value. If `task.params` has entries, they replace that table."""
    found: Table = {}
    for key, value in values_of(profile).items():
        is_params = key == PARAMS and value
        found |= {f"{PARAMS}.{name}": item for name, item in value.items()} if is_params else {key: value}
    return found


def flatten(content: Values, where: str) -> Table:
    """Flatten nested tables to values by dotted key. Raises one ConfigError for all unknown keys; hints name
    the nearest keys."""
    flat: Table = {}
    problems: list[ConfigError] = []
    for section, table in content.items():
        if len(problems) > MOST_PROBLEMS:
            break
        if section not in sections() and (meant := _section(section, table)):
            why = f"{where}: unknown section {shortened(section)}"
            problems.append(ConfigError(why, hint=f"did you mean {meant}?"))
            unknown = (f"{meant}.{name}" for name in table if f"{meant}.{name}" not in keys())
            problems += [unknown_key(key, where, keys()) for key in islice(unknown, MOST_PROBLEMS + 1)]
        elif section not in sections():
            names = islice(_meant(section, table), MOST_PROBLEMS + 1)
            problems += [unknown_key(name, where, [*sections(), *keys()]) for name in names]
        elif not isinstance(table, Mapping):
            hint = f"{section}.<key> = {shortened(table)}"
            problems.append(ConfigError(f"{where}: {section} is a section, not a value", hint=hint))
        else:
            given = {f"{section}.{name}": value for name, value in table.items()}
            others = {key: value for key, value in given.items() if key not in keys()}
            unknown = (name for key, value in others.items() for name in _meant(key, value))
            problems += [unknown_key(key, where, keys()) for key in islice(unknown, MOST_PROBLEMS + 1)]
            flat |= given
    if problems:
        raise combine(problems)
    if isinstance(flat.get(PARAMS), Mapping):
        flat |= {f"{PARAMS}.{name}": value for name, value in flat.pop(PARAMS).items()}
    return flat


def _section(name: str, table: Value) -> str | None:
    """The section that an unknown one probably means, if it has no keys of another trainer: the one with a
    similar name, whose name begins with this one, or the only one that has most of the table's keys."""
    if not isinstance(table, Mapping) or not table:
        return None
    if any(map(foreign, islice(_leaves(name, table), MOST_PROBLEMS))):
        return None
    some = list(islice(table, MOST_PROBLEMS))
    shared = {section: sum(f"{section}.{key}" in keys() for key in some) for section in sections()}
    having_most = [section for section, number in shared.items() if 2 * number > len(table)]
    only = having_most[0] if len(having_most) == 1 else None
    begins = (section for section in sections() if len(name) > 2 and section.startswith(name))
    return nearest(name, sections()) or next(begins, None) or only


def _meant(key: str, value: Value) -> Iterator[str]:
    """The keys in an unknown key's table that belong to another trainer or have names of ours; the key itself
    if there are none."""
    leaves = islice(_leaves(key, value), MOST_PROBLEMS + 1)
    yield from [
        leaf for leaf in leaves if foreign(leaf) or _joined(leaf) or leaf.rpartition(".")[2] in _last_parts()
    ] or [key]


def _joined(key: str) -> str | None:
    """The key that one with a misplaced dot means: placement.rollout_labels for `placement.rollout.label`,
    and placement.trainer_workers for `trainer.workers`."""
    if (placed := f"placement.{key.replace('.', '_')}") in keys():
        return placed
    section, _, name = key.partition(".")
    own = (
        {known.partition(".")[2]: known for known in keys() if known.startswith(f"{section}.")}
        if "." in name
        else {}
    )
    found = nearest(name.replace(".", "_"), own)
    return own[found] if found else None


def _leaves(key: str, value: Value) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _leaves(f"{key}.{name}", item)
    else:
        yield key


def foreign(key: str) -> PeerKey | None:
    """The row for another trainer's key, also below a section of ours; None if a key of ours has exactly this
    name."""
    section, _, name = key.partition(".")
    if key in _last_parts():
        return None
    if (row := counterpart(key)) is not None or section not in sections() or name in _last_parts():
        return row
    # By its last part alone, if all keys of other trainers that end so have the same counterpart, or none.
    found = [row for row in peer_keys() if row.theirs.rpartition(".")[2] == name]
    return found[0] if len({row.ours for row in found}) == 1 else None


@cache
def _last_parts() -> frozenset[str]:
    return frozenset(key.rpartition(".")[2] for key in keys())


def unknown_key(key: str, where: str, known: Collection[str]) -> ConfigError:
    if row := foreign(key):
        return ConfigError(f"{where}: unknown key {shortened(key)}, {row.meaning}", hint=row.hint)
    section = key.partition(".")[0]
    same = [name for name in known if name.endswith(f".{key}")]
    if (own := f"{section}.{key.rpartition('.')[2]}") in known:  # trainer.policy.optimizer_config.lr
        return ConfigError(f"{where}: unknown key {shortened(key)}", hint=f"did you mean {own}?")
    if len(same) > 1:  # the same key of several sections
        hint = f"did you mean {' or '.join(same)}?"
        return ConfigError(f"{where}: unknown key {shortened(key)}", hint=hint)
    names = [name.removeprefix(f"{section}.") for name in known if name.startswith(f"{section}.")]
    there_are = f"keys of [{section}]: {', '.join(names)}" if names else f"sections: {', '.join(sections())}"
    hint = did_you_mean(_joined(key) or key, known, there_are)
    return ConfigError(f"{where}: unknown key {shortened(key)}", hint=hint)


class PeerKey(NamedTuple):
    """A key of the trainer `peer`, our keys that replace it, and a note: what differs, or why we have no such
    key."""

    peer: str
    theirs: str
    ours: tuple[str, ...]
    note: str

    def covers(self, parts: Sequence[str]) -> bool:
        """Whether this is the row of a section that the key, in `parts`, belongs to. The key may have fewer
        parts before it."""
        *section, last = self.theirs.split(".")
        return last == "*" and any(
            section[start:] == list(parts[: len(section) - start]) for start in range(len(section))
        )

    @property
    def meaning(self) -> str:
        """The end of an error's message about the key."""
        ours = " and ".join(self.ours)
        if self.peer == OTHERS:
            return f"which is {ours} here"
        return f"{self.peer}'s name for {ours}" if ours else f"which is {self.peer}'s and has no counterpart"

    @property
    def hint(self) -> str:
        note = f" ({self.note})" if self.note else ""
        return f"use {' and '.join(self.ours)}{note}" if self.ours else self.note


@cache
def peer_keys() -> tuple[PeerKey, ...]:
    """The rows of the tables in docs/coming-from.md."""
    found: list[PeerKey] = []
    page = (shipped_directory("docs") / "coming-from.md").read_text(encoding="utf-8")
    for section in page.split("\n## "):
        _, _, table = section.partition(HEADER)
        for line in table.partition("\n\n")[0].splitlines():
            theirs, ours, note = (cell.strip() for cell in line.strip("|").split("|"))
            own = tuple(ours.replace("`", "").split(", ")) if ours else ()
            found.append(PeerKey(section.partition("\n")[0], theirs.strip("`"), own, note))
    return tuple(found)


def counterpart(key: str) -> PeerKey | None:
    """The row for a key. The key may have fewer parts than in the table (`test_freq`) or more, and Hydra's
    `+` or dashes. Among several rows, the one with the most parts in common, then the first. If there is
    none, the row of its section."""
    parts = key.lstrip("+~-").replace("-", "_").split(".")
    best, most = None, 0
    for row in peer_keys():
        theirs = row.theirs.split(".")
        shared = min(len(theirs), len(parts))
        if shared > most and theirs[-shared:] == parts[-shared:]:
            best, most = row, shared
    if most > 1 or len(parts) == 1:
        return best
    return next((row for row in peer_keys() if row.covers(parts)), best)
