"""`asyncrl samples` and the report's samples: which version wrote what, with and without colours."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from rich.cells import cell_len

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.cli.app import run as asyncrl
from asyncrl_cli.data.sample_fields import BUILT_IN, FIELDS, Field, Schema
from asyncrl_cli.data.trajectories import GroupPayload, trajectory_of
from asyncrl_cli.observe.recorded import Recorded
from asyncrl_cli.observe.terminal import SafeConsole
from asyncrl_cli.report.dumps import Scale, choose, shown, trajectories_of
from asyncrl_cli.report.page import before_and_after_html, samples_html
from asyncrl_cli.train.sample_dump import SampledGroup, dump_samples

WORDS = {1: "say ", 2: "it", 3: "one ", 4: "two ", 5: "three", 6: "<tool>", 7: "<b>&\x1b[31m", 8: "bye"}


def segment(*tokens):
    """Of (token, version, logprob); version -1 was given."""
    ids, versions, logprobs = zip(*tokens, strict=True)
    return dict(
        tokens=np.array(ids, np.int32),
        logprobs=np.array(logprobs, np.float32),
        versions=np.array(versions, np.int32),
        mask=np.array(versions) != -1,
    )


@pytest.fixture
def run(tmp_path):
    """Step 20 with one group: an answer in two versions, a tool's result, an answer; and a trajectory of two
    segments."""
    (tmp_path / "runs" / "r").mkdir(parents=True)
    (tmp_path / "runs" / "r" / "profile.toml").touch()
    given, half = [(1, -1, 0), (2, -1, 0)], np.log(0.5)
    first = segment(*given, (3, 3, half), (4, 3, half), (5, 4, half), (6, -1, 0), (7, 4, half))
    second = segment(*given, (8, 5, half))
    third = segment((1, -1, 0), (3, 5, half))
    trajectories = (
        trajectory_of((first,), BUILT_IN, reward=1.0, finish_reason="stop"),
        trajectory_of((second, third), BUILT_IN, reward=0.0, finish_reason="length"),
    )
    payload = GroupPayload(uid="p7", epoch=0, attempt=0, trajectories=trajectories)
    trainer = [np.log(np.array([0.5, 0.5, 0.125, 0.5], np.float32)), np.log(np.array([0.5, 0.5], np.float32))]
    parts = [{"right": 1.0, "short": 0.125}, {}]
    group = SampledGroup(
        payload=payload, advantages=[0.7, -0.7], parts=parts, logprobs=trainer, answer="[b]7 & 8"
    )
    decode = "".join
    for step in (20, 40):
        dump_samples(
            tmp_path / "runs" / "r" / "samples",
            step,
            [group],
            window=5,
            decode=lambda ids: decode(map(WORDS.get, ids)),
        )
    return Recorded(tmp_path / "runs" / "r")


def printed(run, number, **options):
    console = SafeConsole(width=80, **options)
    with console.capture() as captured:
        console.print(shown(list(trajectories_of(run, 20))[number]))
    return captured.get()


def test_a_pipe_tells_everything_in_plain_text_of_80_columns(run):
    text = printed(run, 0)
    assert "\x1b" not in text
    assert all(cell_len(line) <= 80 for line in text.splitlines())
    assert "(v3)one two (load v4)three" in text
    assert "\nreward right 1, reward short 0.125\n" in text
    assert "reward right 1 · reward short 0.125" in samples_html(run)
    assert "\nexpected: [b]7 & 8\n" in text
    assert re.search("^given +<tool>", text, re.MULTILINE)
    assert "(v4)<b>&\\x1b[31m" in text
    for fact in (
        "reward 1",
        "advantage +0.7",
        "oldest 2 behind window v5",
        "most changed 'three': 0.500 -> 0.125",
    ):
        assert fact in " ".join(text.split())
    assert "segment 2" in printed(run, 1)
    assert "most changed" not in printed(run, 1), "sampler and trainer agree"


def test_colours_tell_the_age_of_versions_and_nothing_else_does_without_them(run):
    coloured = printed(run, 0, force_terminal=True, color_system="truecolor")
    assert "\x1b[38;2;0;158;115mone two " in coloured  # two behind the window
    assert "\x1b[38;2;230;159;0mthree" in coloured
    assert "\x1b[38" not in printed(run, 0, force_terminal=True, no_color=True)


def test_staleness_span_and_probabilities_are_those_of_the_tokens(run):
    first, second = (one.figures() for one in trajectories_of(run, 20))
    assert (first["staleness"], first["span"], first["response_tokens"]) == (2, 1, 4)
    assert first["sampler_probability"] == pytest.approx(0.5)
    assert first["trainer_probability"] == pytest.approx((0.5**3 * 0.125) ** (1 / 4))
    assert (second["staleness"], second["span"], second["response_tokens"]) == (0, 0, 2)


def test_trajectories_are_found_by_step_and_group_and_sorted(run):
    assert [one.step for one in choose(run, None, "", None, 8)] == [40, 40]
    assert [(one.step, one.number) for one in choose(run, None, "p7", None, 3)] == [(40, 0), (40, 1), (20, 0)]
    assert [one.number for one in choose(run, 20, "", "length", 8)] == [0, 1]
    assert [one.staleness for one in choose(run, 20, "", "staleness", 1)] == [2]
    for asked in ((30, ""), (20, "p8")):
        with pytest.raises(ConfigError) as caught:
            choose(run, *asked, None, 8)
        assert caught.value.hint


def test_json_has_the_dumped_lines_and_their_figures(run, capsys):
    assert asyncrl(["samples", str(run.files.path), "--step", "20", "--sort", "span", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["trajectory"], first["figures"]["span"], second["trajectory"]) == (0, 1, 1)
    assert first["pieces"] == ["say ", "it", "one ", "two ", "three", "<tool>", "<b>&\x1b[31m"]


@pytest.fixture
def with_fields(run):
    """The same trajectories with fields of the user's."""
    schema = Schema(
        [
            *FIELDS,
            Field(
                name="entropy", per="sampled", by="trainer", shown="colour", in_samples=True, doc="in nats"
            ),
            Field(name="kind", per="token", by="environment", dtype="int8", shown="number", in_samples=True),
            Field(name="level", per="trajectory", by="environment", shown="number", in_samples=True),
            Field(name="hidden", per="trajectory", by="environment"),
        ]
    )
    told = [(1, -1, 0), (2, -1, 0)]
    answer = {**segment(*told, *((3 + n % 6, 5, -1) for n in range(7))), "kind": np.arange(9, dtype=np.int8)}
    one = trajectory_of((answer,), schema, reward=1.0, finish_reason="stop", level=[2, "hard"], hidden=7)
    other = trajectory_of((segment(*told, (8, 5, -1)),), schema, reward=0.0, finish_reason="stop")
    payload = GroupPayload(uid="p7", epoch=0, attempt=0, trajectories=(one, other))
    loss_fields = {0: {"entropy": np.array([0, 1, 0.1, np.nan, 0.75, 0.76, 0.5], np.float32)}}
    group = SampledGroup(payload=payload, advantages=[None, None], loss_fields=loss_fields)
    decode = lambda ids: "".join(map(WORDS.get, ids))  # noqa: E731
    dump_samples(run.files.samples, 20, [group], window=5, decode=decode, schema=schema)
    return run


def test_a_field_colours_the_tokens_by_levels_with_a_legend_and_marks_for_plain_terminals(
    with_fields, capsys
):
    assert asyncrl(["samples", str(with_fields.files.path), "--step", "20", "--field", "entropy"]) == 0
    text = capsys.readouterr().out
    legend = "entropy (in nats): (0) 0 to 0.2 (1) to 0.4 (2) to 0.6 (3) to 0.8 (4) to 1"
    assert " ".join(text.split()).startswith(legend)
    assert "(0)one (4)two (0)three(-)<tool>(3)<b>&" in text
    chosen = choose(with_fields, 20, "", None, 8)
    console = SafeConsole(width=80, force_terminal=True, color_system="truecolor")
    with console.capture() as captured:
        console.print(shown(chosen[0], Scale("entropy", chosen)))
    assert "\x1b[38;2;213;94;0mtwo " in captured.get()


def test_few_values_are_levels_of_their_own(with_fields):
    assert Scale("logprobs", choose(with_fields, 20, "", None, 8)).legend.plain == "logprobs: (0) -1"


def test_a_field_that_is_a_number_is_among_the_facts_and_on_the_report_page(with_fields):
    text = " ".join(printed(with_fields, 0).split())
    assert 'kind 5, level [2, "hard"]' in text
    assert "hidden" not in text
    page = samples_html(with_fields)
    assert "kind 5 · level [2, &quot;hard&quot;]" in page
    assert '<span title="entropy 0.75">' in page


@pytest.mark.parametrize("name", ["entropie", "level", "hidden", "trainer_logprobs"])
def test_an_unknown_field_is_refused_with_those_that_are_known(with_fields, name, capsys):
    arguments = ["samples", str(with_fields.files.path), "--step", "20"]
    assert asyncrl([*arguments, "--field", name]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert f"no field '{name}' with a number for each token" in told
    assert "hint: known: versions, logprobs, entropy, kind" in told


def test_json_has_the_fields(with_fields, capsys):
    assert asyncrl(["samples", str(with_fields.files.path), "--step", "20", "--json"]) == 0
    first, _ = json.loads(capsys.readouterr().out)
    assert first["fields"]["kind"]["values"] == [*range(9)]
    assert first["fields"]["level"] == {
        "per": "trajectory",
        "shown": "number",
        "doc": "",
        "values": [2, "hard"],
    }
    assert first["fields"]["entropy"]["values"][:4] == [None, None, 0, 1]


@pytest.mark.parametrize("values", [[1.0], 3, None])
def test_a_field_that_does_not_cover_the_tokens_spoils_its_line(with_fields, values):
    path = with_fields.files.samples / "step-000020.jsonl"
    first, second = map(json.loads, path.read_text().splitlines())
    first["fields"]["kind"]["values"] = values
    path.write_text(f"{json.dumps(first)}\n{json.dumps(second)}\n")
    assert [one.number for one in trajectories_of(with_fields, 20)] == [1]
    assert with_fields.damage.notes


class Read(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags, self.text, self.depth = [], "", 0

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.depth += 1

    def handle_endtag(self, tag):
        self.depth -= 1

    def handle_data(self, data):
        self.text += data


def test_a_page_has_the_text_escaped_by_version_with_changed_tokens_marked(run):
    page = Read()
    page.feed(samples_html(run))
    assert page.depth == 0
    assert "<b>&\x1b[31m" in page.text
    assert page.text.count("expected[b]7 & 8") == 4
    marks = [attrs["title"] for tag, attrs in page.tags if tag == "mark"]
    assert marks == ["sampler 0.500, trainer 0.125"] * 2
    assert [attrs["class"] for tag, attrs in page.tags if tag == "details"] == ["sample"] * 4
    assert sum(attrs.get("class") == "load" for tag, attrs in page.tags if tag == "sup") == 2


def test_a_page_tells_of_a_dump_that_cannot_be_read_and_shows_the_others(run):
    damaged = run.files.samples / f"step-{run.sampled_steps[0]:06d}.jsonl"
    damaged.unlink()
    damaged.mkdir()
    page = Read()
    page.feed(samples_html(run))
    assert "it is a directory, not a file" in page.text
    assert [attrs["class"] for tag, attrs in page.tags if tag == "details"]


def test_a_page_shows_the_answers_before_and_after_side_by_side(tmp_path):
    def line(version: int, uid: str, text: str, reward: float, **more: object) -> str:
        answer = {} if uid == "b" else {"answer": "<yes>"}
        sample = {"uid": uid, "prompt": "2 < 3?", "text": text, "reward": reward, **answer}
        return json.dumps({"event": "eval", "version": version, "samples": [sample], **more}) + "\n"

    lines = [line(0, "a", "maybe <b>", 0.0), line(3, "a", "perhaps", 0.5), line(4, "a", "yes\nit is", 1.0)]
    lines += [line(0, "b", "of another set", 0.0, eval_set="hard")]
    (tmp_path / "events.jsonl").write_text("".join(lines))
    html = before_and_after_html(Recorded(tmp_path))
    page = Read()
    page.feed(html)
    assert page.depth == html.count("<br>") == 3
    assert "version 0version 4" in page.text
    assert "2 < 3?expected: <yes>maybe <b>reward 0yes\nit isreward 1" in page.text
    assert not any(word in page.text for word in ("perhaps", "another set"))
    (tmp_path / "events.jsonl").write_text("".join(lines[-1:]))
    assert before_and_after_html(Recorded(tmp_path)) == ""


def test_a_run_without_samples_is_told_which_key_keeps_them(tmp_path):
    run = Recorded(tmp_path)
    assert samples_html(run) == ""
    with pytest.raises(ConfigError, match="has no samples yet: no step has ended"):
        choose(run, None, "", None, 8)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time_s": 1.0, "groups_trained": 4}\n')
    with pytest.raises(ConfigError, match=r"has no samples$") as caught:
        choose(run, None, "", None, 8)
    assert "samples_every_steps" in caught.value.hint
    (tmp_path / "replay.json").write_text('{"of": "runs/first"}')
    with pytest.raises(ConfigError, match=r"has no samples$") as caught:
        choose(Recorded(tmp_path), None, "", None, 8)
    assert caught.value.hint.endswith("`asyncrl samples first`")
