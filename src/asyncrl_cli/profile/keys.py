"""A profile's dotted keys, like `run.seed`: their names, flattening tables to them, validation, and what each
key expects."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import cache
from itertools import islice
from typing import Any

from pydantic import ValidationError

from asyncrl_cli.base.errors import MOST_PROBLEMS, ConfigError, combine, did_you_mean, nearest
from asyncrl_cli.base.paths import MAX_NAME_BYTES, MAX_PATH_BYTES
from asyncrl_cli.profile.fields import Section
from asyncrl_cli.profile.peers import PeerKey, counterpart, renamed
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.profile.toml_files import LONGEST_ECHO, parse_value, shortened

PARAMS = "task.params"
"""The only table with free keys: each entry counts as a key, `task.params.<name>`."""


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


def values_of(profile: Profile) -> dict[str, Any]:
    """Every key with its value."""
    return {f"{section}.{name}": value for section in sections() for name, value in getattr(profile, section)}


def with_values(profile: Profile, values: Mapping[str, Any]) -> Profile:
    """The profile with other values, by dotted key. They are not validated."""
    for key, value in values.items():
        section, _, name = key.partition(".")
        changed = getattr(profile, section).model_copy(update={name: value})
        profile = profile.model_copy(update={section: changed})
    return profile


def entries_of(profile: Profile) -> dict[str, Any]:
    """Every key with its value. If `task.params` has entries, they replace that table."""
    found: dict[str, Any] = {}
    for key, value in values_of(profile).items():
        is_params = key == PARAMS and value
        found |= {f"{PARAMS}.{name}": item for name, item in value.items()} if is_params else {key: value}
    return found


def flatten(content: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Flatten nested tables to values by dotted key. Raises one ConfigError for all unknown keys; hints name
    the nearest keys."""
    flat: dict[str, Any] = {}
    problems: list[ConfigError] = []
    for section, table in content.items():
        if len(problems) > MOST_PROBLEMS:
            break
        if section not in sections() and (meant := _section(section, table)):
            problems.append(
                ConfigError(f"{where}: unknown section {shortened(section)}", hint=f"did you mean {meant}?")
            )
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
            unknown = (
                name for key, value in given.items() if key not in keys() for name in _meant(key, value)
            )
            problems += [unknown_key(key, where, keys()) for key in islice(unknown, MOST_PROBLEMS + 1)]
            flat |= given
    if problems:
        raise combine(problems)
    if isinstance(flat.get(PARAMS), Mapping):
        flat |= {f"{PARAMS}.{name}": value for name, value in flat.pop(PARAMS).items()}
    return flat


def _section(name: str, table: Any) -> str | None:
    """The section that an unknown one probably means, if it has no keys of another trainer: the one with a
    similar name, whose name begins with this one, or the only one that has most of the table's keys."""
    if (
        not isinstance(table, Mapping)
        or not table
        or any(map(foreign, islice(_leaves(name, table), MOST_PROBLEMS)))
    ):
        return None
    shared = {
        own: sum(f"{own}.{key}" in keys() for key in islice(table, MOST_PROBLEMS)) for own in sections()
    }
    having_most = [own for own, number in shared.items() if 2 * number > len(table)]
    begins = (own for own in sections() if len(name) > 2 and own.startswith(name))
    return (
        nearest(name, sections()) or next(begins, None) or (having_most[0] if len(having_most) == 1 else None)
    )


def _meant(key: str, value: Any) -> Iterator[str]:
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


def _leaves(key: str, value: Any) -> Iterator[str]:
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
    return counterpart(key) or (
        renamed(name) if section in sections() and name not in _last_parts() else None
    )


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
        return ConfigError(
            f"{where}: unknown key {shortened(key)}", hint=f"did you mean {' or '.join(same)}?"
        )
    names = [name.removeprefix(f"{section}.") for name in known if name.startswith(f"{section}.")]
    there_are = f"keys of [{section}]: {', '.join(names)}" if names else f"sections: {', '.join(sections())}"
    return ConfigError(
        f"{where}: unknown key {shortened(key)}", hint=did_you_mean(_joined(key) or key, known, there_are)
    )


def validate(values: Mapping[str, Any], origins: Mapping[str, str]) -> Profile:
    """Make the profile from values by key, including name and purpose. Raises one ConfigError for all type
    and range errors."""
    nested: dict[str, Any] = {}
    params: dict[str, Any] = {}
    for key, value in values.items():
        section, _, name = key.partition(".")
        if key.startswith(f"{PARAMS}."):
            params[key.removeprefix(f"{PARAMS}.")] = value
        elif name:
            nested.setdefault(section, {})[name] = value
        else:
            nested[key] = value
    if params:
        nested.setdefault("task", {}).setdefault("params", params)
    try:
        return Profile.model_validate(nested)
    except ValidationError as error:
        wrong = dict.fromkeys(".".join(str(part) for part in detail["loc"][:2]) for detail in error.errors())
        raise combine([_wrong_value(key, values[key], origins[key]) for key in wrong]) from None


def _wrong_value(key: str, value: Any, origin: str) -> ConfigError:
    text = shortened(value)
    shown = f'"{text}"' if isinstance(value, str) else text.lower() if isinstance(value, bool) else text
    return ConfigError(
        f"{key} = {shown} ({origin}): expected {expected(key)}", hint=_type_hint(key, value, origin)
    )


def _type_hint(key: str, value: Any, origin: str) -> str:
    meaning = f"its meaning: {keys().get(key, 'one line of text')}"
    if len(shortened(value)) >= LONGEST_ECHO:
        return meaning
    choices = [choice for option in _options(key) for choice in _choices(option)]
    kinds = {option["type"] for option in _options(key) if not _choices(option)}
    if isinstance(value, str):
        if kinds - {"string"} and parse_value(value) != value:
            return f"remove the quotes: {key} = {value}"
        return did_you_mean(value, choices, meaning, '"{}"'.format)
    if kinds == {"string"}:
        return f"quote it: --set '{key}=\"{value}\"'" if origin == "--set" else f'quote it: {key} = "{value}"'
    return meaning


def expected(key: str) -> str:
    """What a value of `key` must be, in words: `an integer of at least 1`."""
    return " or ".join(map(_describe, _options(key)))


def choices(key: str) -> list[str]:
    """The values of a key that has a fixed list of them, as TOML or as text; empty for any other key."""
    named = [choice for option in _options(key) for choice in _choices(option)]
    return named + (
        ["true", "false"] if any(option.get("type") == "boolean" for option in _options(key)) else []
    )


def _options(key: str) -> list[dict[str, Any]]:
    """The kinds of value that `key` accepts, as JSON schemas."""
    section, _, name = key.partition(".")
    if not name:
        return [{"type": "string"}]
    schema = _schema()["$defs"][sections()[section].__name__]["properties"][name.split(".")[0]]
    return [option for option in schema.get("anyOf", [schema]) if option.get("type") != "null"]


@cache
def _schema() -> dict[str, Any]:
    return Profile.model_json_schema()


def _choices(option: Mapping[str, Any]) -> list[str]:
    return option["enum"] if "enum" in option else [option["const"]] if "const" in option else []


def _describe(option: Mapping[str, Any]) -> str:
    if choices := [f'"{choice}"' for choice in _choices(option)]:
        return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
    if items := option.get("prefixItems"):
        return f"{len(items)} numbers, each {_describe(items[0])}"
    if option["type"] == "array":
        return f"an array, each entry {_describe(option['items'])}"
    if option.get("format") == "path":
        return f"a string, with at most {MAX_NAME_BYTES} bytes in a name and {MAX_PATH_BYTES} in a path"
    return _NAMES[option["type"]] + "".join(
        text.format(option[name]) for name, text in _LIMITS.items() if name in option
    )


_NAMES = {
    "integer": "an integer",
    "number": "a number",
    "string": "a string",
    "boolean": "true or false",
    "object": "a table",
}
_LIMITS = {
    "minimum": " of at least {}",
    "exclusiveMinimum": " above {}",
    "maximum": " and at most {:,}",
    "exclusiveMaximum": " and below {}",
    "minLength": " of at least {} character",
    "maxLength": " of at most {} characters",
    "multipleOf": " in steps of {}",
    "examples": ' like "{0[0]}"',
}
