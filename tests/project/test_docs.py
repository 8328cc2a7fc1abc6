"""docs/: references that are as the code is, a meaning for every metric, and a place in the site for every
page."""

import json
import re

import pytest
import yaml
from docs.make.references import DOCS, PAGES, renewed

from asyncrl_cli.measure.states import State
from asyncrl_cli.observe.run_lines import meaning_of
from asyncrl_cli.profile.keys import sections
from asyncrl_cli.profile.loaded import load
from asyncrl_cli.tasks.task import load_task
from tests.report.recorded_run import line

ROOT = DOCS.parent
METRIC = re.compile(
    r'"((?:reward|response_tokens|timing|trainer|rollouter|ref|env|staleness|sync|waste|correction|train|critic|samples)/\w+)"'
)


@pytest.mark.parametrize("name", PAGES)
def test_a_reference_is_as_the_code_is(name):
    """`python -m docs.make.references` writes it anew."""
    page = (DOCS / name).read_text(encoding="utf-8")
    assert page == renewed(page, PAGES[name]())


def test_every_metric_that_the_code_names_has_a_meaning():
    rooms = (ROOT / "src" / "asyncrl_cli" / room for room in ("loop", "train", "observe"))
    texts = (path.read_text(encoding="utf-8") for room in rooms for path in room.rglob("*.py"))
    named = {name for text in texts for name in METRIC.findall(text)} | set(line(1))
    assert len(named) > 60
    # a label of `asyncrl compare`
    assert {name for name in named if meaning_of(name) is None} <= {"samples/s"}


def test_the_readme_names_every_section_and_its_profile_is_one(tmp_path):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall("```toml\n(.*?)```", readme, re.DOTALL)
    (tmp_path / "my.toml").write_text(block, encoding="utf-8")
    (tmp_path / "rewards.py").write_text("def score(item, response): return 1.0\n", encoding="utf-8")
    rows = (json.dumps({"prompt": f"{number} + 1", "answer": str(number + 1)}) for number in range(96))
    (tmp_path / "prompts.jsonl").write_text("\n".join(rows), encoding="utf-8")
    loaded = load(str(tmp_path / "my.toml"), environ={})
    task = load_task(loaded.profile)
    assert (len(task.train), len(task.eval)) == (32, 64)
    assert loaded.profile.task.import_path == str(tmp_path)
    assert loaded.warnings == ()
    named = re.search(r"The sections are ([^.]*)\.", readme)[1]
    assert re.findall(r"`(\w+)`", named) == list(sections())


def test_the_table_of_states_has_every_state_of_an_executor():
    concepts = (DOCS / "concepts.md").read_text(encoding="utf-8")
    table = concepts.partition("| state | meaning |\n")[2].partition("\n\n")[0]
    named = {name for row in table.splitlines() for name in re.findall(r"`([^`]+)`", row.split("|")[1])}
    assert named - {"restarting"} == set(State)  # shown for `failed` while a process is started anew


def test_every_page_has_a_place_in_the_site():
    site = yaml.safe_load((ROOT / ".ci" / "mkdocs.yml").read_text(encoding="utf-8"))
    assert set(_pages(site["nav"])) == {path.name for path in DOCS.glob("*.md")}


def _pages(part):
    """The names of pages in a part of the site's tree."""
    if isinstance(part, str):
        return [part]
    return [name for inner in (part.values() if isinstance(part, dict) else part) for name in _pages(inner)]
