"""Tables and reports of a comparison whose figures are given."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from asyncrl_cli.base.errors import RefusedError
from asyncrl_cli.bench.output import (
    heading_of,
    output_directory,
    report_text,
    short_notes,
    table_of,
    write_results,
)
from asyncrl_cli.bench.results import Comparison, Contestant, Range, Result, read_results

SPLIT = ("on-policy-pipeline", "stream-off-policy", "stale-samples", "partial-rollout", "one-step-off")
NAMES = ("colocate", *SPLIT)

BOUND = dict(
    generation_s=100.0, training_s=50.0, ideal_s=100.0, rollout_tokens_per_s=1e6, trainer_tokens_per_s=2e6
)


def result(name: str, speed: float) -> Result:
    single = {"window_time_s": 512 / speed, "speedup": speed / 2, "bound_ratio": 0.8, **BOUND}
    figures = {
        "groups_per_s": Range(median=speed, min=speed * 0.9, max=speed * 1.1),
        "step_s_mean": Range(median=1.25, min=1.0, max=1.5),
        **{figure: Range.of([value]) for figure, value in single.items()},
    }
    contestant = Contestant(name=name, mode=name, step_groups=128, window_groups=512)
    return Result(contestant=contestant, figures=figures, seeds=(0, 1))


def comparison(workload: str = "big") -> Comparison:
    sizes: dict[str, Any] = {"groups": 5120, "window_groups": 512, "seeds": (0, 1), "resources": "128 GPUs"}
    results = [result(name, speed) for speed, name in enumerate(NAMES, 2)]
    remarks = ("colocate fits within 1%",)
    return Comparison(results=results, workload=workload, baseline="colocate", remarks=remarks, **sizes)


def printed(made: Comparison, width: int = 100) -> str:
    """As the command prints it on a terminal, or into a pipe, of `width` columns."""
    console = Console(width=width, file=io.StringIO())
    console.print(heading_of(made), markup=False, soft_wrap=True)
    console.print(table_of(made), crop=False)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def table_lines(made: Comparison, width: int) -> list[str]:
    return [line.rstrip() for line in printed(made, width).splitlines()[1:]]


def test_six_profiles_fit_on_100_columns() -> None:
    lines = table_lines(comparison(), 100)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= 100
    assert all(part in text for name in NAMES for part in name.split("-"))
    assert "3.50x" in text  # one-step-off: 7 groups per second against 2
    assert "s per 512 groups" in text


@pytest.mark.parametrize("width", [100, 80, 20])
def test_no_number_is_folded_however_narrow_the_terminal(width: int) -> None:
    lines = table_lines(comparison(), width)
    assert lines == table_lines(comparison(), 1000)
    speeds = next(index for index, line in enumerate(lines) if line.startswith("groups/s"))
    assert lines[speeds].split()[1:] == ["2", "3", "4", "5", "6", "7"]
    assert lines[speeds + 1].split() == ["1.8-2.2", "2.7-3.3", "3.6-4.4", "4.5-5.5", "5.4-6.6", "6.3-7.7"]


def test_a_simulated_table_is_headed_so_and_a_measured_one_is_not() -> None:
    assert printed(comparison()).startswith("SIMULATED on the workload big")
    assert "SIMULATED" not in printed(comparison(workload=""))


def test_both_files_are_written_and_say_simulated(tmp_path: Path) -> None:
    results, report = write_results(comparison(), tmp_path)
    assert set(tmp_path.iterdir()) == {results, report} == {tmp_path / "results.json", tmp_path / "report.md"}
    document = json.loads(results.read_text())
    assert (document["schema_version"], document["simulated"], document["window_groups"]) == (1, True, 512)
    assert [row["profile"] for row in document["results"]] == list(NAMES)
    assert document["results"][0]["speedup"] == 1.0
    assert document["results"][1]["spread"]["groups_per_s"] == [2.7, pytest.approx(3.3)]
    assert "SIMULATED" in report.read_text()
    assert "colocate fits within 1%" in report.read_text()


def test_a_report_explains_only_rows_that_it_has() -> None:
    simulated, real = report_text(comparison()), report_text(comparison(workload=""))
    for missing in ("final reward", "Evals", "scored version 0"):
        assert missing not in simulated
        assert missing in real
    assert "in this very run" in real
    assert "in full batches" in simulated
    unbound = [
        replace(one, figures={name: spread for name, spread in one.figures.items() if name not in BOUND})
        for one in comparison().results
    ]
    assert "limited by" not in report_text(replace(comparison(), results=unbound))


def test_runs_that_are_missing_are_named(tmp_path: Path) -> None:
    made = replace(comparison(workload=""), missing=("colocate-r1", "partial-rollout-r1"))
    assert "Not finished: colocate-r1, partial-rollout-r1." in report_text(made)
    written = json.loads(write_results(made, tmp_path)[0].read_text())
    assert written["missing"] == ["colocate-r1", "partial-rollout-r1"]
    assert "Not finished" not in report_text(comparison())


def test_a_heading_says_how_many_runs_the_medians_are_of() -> None:
    made = comparison()
    assert "median of 2 runs" in heading_of(made)
    one_less = replace(made.results[-1], seeds=(0,))
    assert "median of 1 to 2 runs" in heading_of(replace(made, results=[*made.results[:-1], one_less]))
    alone = [replace(result, seeds=(0,)) for result in made.results]
    assert "median" not in heading_of(replace(made, results=alone))


def test_a_directory_that_holds_anything_is_refused(tmp_path: Path) -> None:
    with output_directory(tmp_path / "new") as directory:
        assert directory.is_dir()
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RefusedError, match="is not empty"), output_directory(tmp_path):
        pass


def test_an_interrupted_comparison_leaves_no_directory_of_its_own_and_nothing_else_is_touched(
    tmp_path: Path,
) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(KeyboardInterrupt), output_directory(tmp_path / "mine" / "bench" / "now"):
        raise KeyboardInterrupt
    assert list((tmp_path / "mine").iterdir()) == []


def test_results_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    made = comparison()
    figures = {"groups_per_s": Range(median=2.0, min=1.0, max=3.0)}
    bare = replace(made, results=[replace(made.results[0], figures=figures)], workload="")
    for one in (made, bare):
        assert read_results(write_results(one, tmp_path)[0]).to_json() == one.to_json()


@pytest.mark.parametrize(
    "content", ["no JSON", "{}", '{"schema_version": 1}', '{"schema_version": 1, "results": 7}']
)
def test_results_that_are_none_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(RefusedError, match=r"results\.json"):
        read_results(tmp_path / "results.json")


def test_a_table_says_where_the_sides_are_not_equal() -> None:
    equal = comparison()
    assert "not equal" not in report_text(equal)
    base, other, *_ = equal.results
    figures = {"tokens_per_s": 100.0, "window_time_s": 10.0}
    ranges = {name: Range(median=value, min=value, max=value) for name, value in figures.items()}
    longer = replace(ranges["tokens_per_s"], median=110.0)
    same = replace(base, figures={**base.figures, **ranges})
    unequal = replace(
        other,
        contestant=replace(other.contestant, step_groups=256),
        figures={**other.figures, **ranges, "tokens_per_s": longer},
    )
    text = report_text(replace(equal, results=[same, unequal]))
    assert "| not equal |  | K, length |" in text
    assert "| steps per sync (K) | 4 | 2 |" in text
    assert "| groups per sync (W) | 512 | 512 |" in text


def test_what_limits_each_simulated_profile_is_below_the_table_and_in_the_files(tmp_path: Path) -> None:
    text = "limited by sync: rank 0 (40% less time with twice as much); at 128 GPUs more no longer pay"
    made = replace(comparison(), outlooks={"colocate": text})
    assert f"SIMULATED, colocate: {text}" in [*short_notes(made)]
    assert f"- SIMULATED, colocate: {text}" in report_text(made)
    write_results(made, tmp_path)
    assert read_results(tmp_path / "results.json").outlooks == {"colocate": text}
