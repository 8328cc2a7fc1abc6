"""What files, names and errors bring along is shown on a terminal, and never obeyed."""

from __future__ import annotations

import io

import pytest
from rich.table import Table

from asyncrl_cli.observe.screen import Plain, ProgressLine
from asyncrl_cli.observe.terminal import SafeConsole, neutral, uncoloured

HOSTILE = {
    "clear the screen": "\x1b[2J",
    "the window's title": "\x1b]0;owned\x07",
    "the clipboard": "\x1b]52;c;cm0gLXJm\x1b\\",
    "C1 CSI": "\x9b31m",
    "C1 OSC": "\x9d0;owned\x9c",
    "a bell": "\x07",
    "back to the line's begin": "all is well\rerror",
    "delete": "\x7f\x08",
    "another direction": "\u202egnp.exe\u2066",
    "a line separator": "\u2028\u2029",
    "a lone surrogate": "\udce9",
}
FORBIDDEN = {
    *map(chr, range(0x20)),
    *map(chr, range(0x7F, 0xA0)),
    *"\u061c\u200e\u200f\u2028\u2029\u202e\u2066",
} - {"\n", "\t"}


def said_by(console_options: dict[str, object], text: object) -> str:
    stream = io.StringIO()
    SafeConsole(file=stream, width=200, **console_options).print(text)
    return stream.getvalue()


@pytest.mark.parametrize("size", ["0", "00"])
def test_a_terminal_that_says_it_has_no_columns_is_one_of_unknown_size(size, monkeypatch):
    monkeypatch.setenv("COLUMNS", size)
    monkeypatch.setenv("LINES", size)
    assert SafeConsole(file=io.StringIO()).size >= (80, 25)
    monkeypatch.setenv("COLUMNS", "100")
    assert SafeConsole(file=io.StringIO()).width == 100


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_control_sequences_are_shown_as_escapes(text):
    table = Table(title=text)
    table.add_column(text)
    table.add_row(text)
    for shown in (neutral(text), said_by({}, text), said_by({}, table)):
        assert not FORBIDDEN & set(shown), shown
        assert not any("\ud800" <= character <= "\udfff" for character in shown)
    assert "\\x" in neutral(text) or "\\u" in neutral(text)


@pytest.mark.parametrize("text", ["[bold]x[/bold]", "[link=http://x]y[/link]", "[/]", "[red", ":bomb:"])
def test_markup_of_others_is_text(text):
    table = Table(box=None)
    table.add_column("name")
    table.add_row(text)
    assert said_by({}, text).rstrip("\n") == text
    assert text in said_by({"force_terminal": True, "color_system": None}, table)


def test_our_own_styles_still_become_colours():
    from rich.text import Text

    assert "\x1b[1;31m" in said_by(
        {"force_terminal": True, "color_system": "standard", "_environ": {}}, Text("x", style="bold red")
    )


def test_text_that_harms_nobody_stays_as_it_is():
    text = "Größe\t3 ≤ 4 → ▁▂▃\n日本語 🙂\n"
    assert neutral(text) == text


def test_a_logs_colours_go_and_its_other_sequences_are_shown():
    assert uncoloured("\x1b[31mERROR\x1b[0m \x1b[2Jgone") == "ERROR \\x1b[2Jgone"


def test_progress_and_plain_lines_are_neutral():
    stream = io.StringIO()
    Plain(stream).event({"event": "warning", "time_s": 1.0, "message": "\x1b[2Jx"})
    with ProgressLine("plain", SafeConsole(file=stream)) as say:
        say("loading \x1b]0;x\x07")
    assert "\x1b" not in stream.getvalue()
    assert "\\x1b[2Jx" in stream.getvalue()


def test_where_the_terminal_has_ascii_only_bars_are_drawn_in_it():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="backslashreplace")
    SafeConsole(file=stream, width=80).print("━━ x · █▌ ▁▄▇ é")
    stream.flush()
    assert stream.buffer.getvalue() == b"== x - ## _=# \\xe9\n"
