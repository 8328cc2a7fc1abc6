"""Writes the references of docs/ that are made of the code: every key, every metric, every built-in field,
and what is said about mistakes.

    # after a change of a key, of a field, of observe/meanings.toml or of a tested mistake
    python -m docs.make.references

A test fails while a page is not as this would write it.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.cli.test_errors import MISTAKES
from tests.profile.test_check import CONFLICTS

from asyncrl_cli.base import errors
from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.cli.app import run
from asyncrl_cli.data.sample_fields import FIELDS, Field
from asyncrl_cli.observe.run_lines import meanings
from asyncrl_cli.profile.keys import keys, sections
from asyncrl_cli.profile.loaded import load
from asyncrl_cli.profile.toml_files import toml_value
from asyncrl_cli.profile.validation import expected

DOCS = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- begin: written by docs/make/references.py -->\n", "<!-- end -->\n"


def renewed(page: str, made: str) -> str:
    """The page with `made` between its two marks."""
    before, _, rest = page.partition(BEGIN)
    _, mark, after = rest.partition(END)
    assert mark, "the page has lost its marks"
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def configuration() -> str:
    return "\n".join(line for section in sections() for line in _section(section))


def _section(section: str) -> Iterator[str]:
    kind = sections()[section]
    yield f"## [{section}]\n\n{_linked(' '.join((kind.__doc__ or '').split()))}\n"
    for name, field in kind.model_fields.items():
        key, default = f"{section}.{name}", field.get_default(call_default_factory=True)
        shown = "not set" if default is None else f"`{toml_value(default)}`"
        yield f"### {key}\n\nDefault: {shown}. Expects {expected(key)}.\n\n{_linked(keys()[key])}\n"


def metrics() -> str:
    rows = (
        f"| {', '.join(f'`{name}`' for name in names.split())} | {_linked(text)} |"
        for names, text in meanings().items()
    )
    return "\n".join(["| key | meaning |", "|---|---|", *rows, ""])


def mistakes() -> str:
    """The tested mistakes as they are told now."""
    conflicts = [
        (f"--profile {reference} {_sets(sets)}", _refusal(reference, sets))
        for reference, sets, *_ in CONFLICTS
    ]
    commands = [(f"asyncrl {' '.join(arguments)}", _said(arguments)) for arguments, *_ in MISTAKES]
    tree = (errors.__doc__ or "").partition("\n\n")[2]
    return "\n".join(
        [
            f"```\n{tree.rstrip()}\n```\n",
            "## Settings that contradict each other\n\nAll end with exit code 2, before anything has "
            "started.\n",
            *_table(conflicts),
            "## Mistakes on the command line\n",
            *_table(commands),
        ]
    )


def fields() -> str:
    rows = (
        f"| `{one.name}` | {one.per} | {one.by} | {f'`{one.dtype}`' if one.is_array else 'JSON'} | "
        f"{', '.join(_places(one))} | {one.doc} |"
        for one in FIELDS
    )
    return "\n".join(["| field | per | written by | type | in | |", "|---|---|---|---|---|---|", *rows, ""])


def _places(one: Field) -> Iterator[str]:
    if one.in_checkpoints:
        yield "checkpoints"
    if one.in_samples:
        yield "samples"
    if one.in_losses or one.by == "scorer":
        yield "losses"


def _sets(sets: Sequence[str]) -> str:
    return " ".join(
        f"--set '{text}'" if re.search(r"[\[\]{} \"]", text) else f"--set {text}" for text in sets
    )


def _refusal(reference: str, sets: Sequence[str]) -> str:
    try:
        load(reference, sets, environ={})
    except ConfigError as error:
        return "\n".join([f"error: {error.message}", *(f"hint: {hint}" for hint in error.hint.splitlines())])
    raise AssertionError(f"{sets} is not refused")


def _said(arguments: Sequence[str]) -> str:
    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = run(list(arguments))
    return f"{said.getvalue().strip()}\nexit code {code}"


def _table(rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    yield "| asked | told |\n|---|---|"
    for asked, told in rows:
        yield f"| {_code(asked)} | {'<br>'.join(map(_code, told.splitlines()))} |"
    yield ""


def _code(text: str) -> str:
    """Text as code in a table's cell."""
    return f"`{text}`".replace("|", "\\|") if "`" not in text else f"`` {text} ``".replace("|", "\\|")


def _linked(text: str) -> str:
    """Names of pages become links to them."""
    return re.sub(r"docs/([\w-]+\.md)", r"[\1](\1)", text)


PAGES: dict[str, Callable[[], str]] = {
    "configuration.md": configuration,
    "metrics.md": metrics,
    "errors.md": mistakes,
    "data.md": fields,
}


def main() -> None:
    for name, make in PAGES.items():
        page = DOCS / name
        page.write_text(renewed(page.read_text(encoding="utf-8"), make()), encoding="utf-8")
        print(f"wrote {page}")


if __name__ == "__main__":
    main()
