"""Ways to damage a run's directory: functions of its path. They replace files, which may be links, and never
write into them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

STEP = "samples/step-000005.safetensors"
Arrays = dict[str, np.ndarray]
Line = dict[str, Any]


def replaced(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


def lines(path: Path, change: Callable[[list[Line]], list[Line] | None]) -> None:
    content = [json.loads(text) for text in path.read_text().splitlines()]
    content = change(content) or content
    replaced(path, "".join(json.dumps(line) + "\n" for line in content).encode())


def metrics(key: str, change: float) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        def one(content: list[Line]) -> None:
            content[4][key] += change

        lines(run / "metrics.jsonl", one)

    return damage


def events(change: Callable[[list[Line]], list[Line] | None]) -> Callable[[Path], None]:
    return lambda run: lines(run / "events.jsonl", change)


def arrays(change: Callable[[Arrays, Line], None]) -> Callable[[Path], None]:
    """Change a step's arrays and its head."""

    def damage(run: Path) -> None:
        with safe_open(run / STEP, framework="np") as file:
            content = {name: file.get_tensor(name).copy() for name in file.keys()}  # noqa: SIM118
            head = json.loads(file.metadata()["step"])
        change(content, head)
        (run / STEP).unlink()
        save_file(content, run / STEP, metadata={"step": json.dumps(head)})

    return damage


def flipped(name: str, at: int = -9) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        content = bytearray((run / name).read_bytes())
        content[at] ^= 4
        replaced(run / name, bytes(content))

    return damage


def first_of(content: list[Line], name: str) -> Line:
    return next(line for line in content if line["event"] == name and line.get("step", 9) > 2)


def without(name: str) -> Callable[[list[Line]], list[Line]]:
    def change(content: list[Line]) -> list[Line]:
        key = first_of(content, name)["group"]
        return [line for line in content if (line["event"], line.get("group")) != (name, key)]

    return change


def never_ends(content: list[Line]) -> list[Line]:
    key = first_of(content, "trained")["group"]
    return [line for line in content if line["event"] == "running" or line.get("group") != key]


def twice(content: list[Line]) -> list[Line]:
    key = first_of(content, "trained")["group"]
    again = [
        line for line in content if line.get("group") == key and line["event"] in ("training", "trained")
    ]
    return content + again


def older(content: list[Line]) -> None:
    for line in content:
        if line["event"] == "trained" and line["step"] == 8:
            line["versions"] = [[max(version - 3, 0), count] for version, count in line["versions"]]


def newer(content: list[Line]) -> None:
    line = first_of(content, "trained")
    line["versions"] = [[version + 5, count] for version, count in line["versions"]]


def loaded_late(content: list[Line]) -> None:
    loads = [line for line in content if line["event"] == "loaded"]
    for load in loads:
        if load["version"] == loads[0]["version"]:
            load["began_s"] = content[-1]["time_s"]


def skips_a_version(content: list[Line]) -> list[Line]:
    return [line for line in content if (line["event"], line["version"]) != ("published", 2)]


def stamped_wrong(content: Arrays, head: Line) -> None:
    """All tokens of the step say another version, which the window allows."""
    versions = content["token/versions"]
    sampled = versions >= 0
    versions[sampled] = np.where(versions[sampled] == head["window"], head["window"] - 1, head["window"])


def other_temperature(content: Arrays, head: Line) -> None:
    content["token/logprobs"] /= 1.25


def positive_logprob(content: Arrays, head: Line) -> None:
    content["token/logprobs"][np.flatnonzero(content["token/mask"])[3]] = 0.25


def untrained_token(content: Arrays, head: Line) -> None:
    content["token/mask"][np.flatnonzero(content["token/mask"])[3]] = False


def trained_prompt(content: Arrays, head: Line) -> None:
    content["token/mask"][0] = True


def no_mean(content: Arrays, head: Line) -> None:
    for group in head["groups"]:
        rewards = np.array([one["reward"] for one in group["result"]["trajectories"]])
        group["advantages"] = (rewards / (rewards.std(ddof=1) + 1e-6)).tolist()


def no_deviation(content: Arrays, head: Line) -> None:
    for group in head["groups"]:
        rewards = np.array([one["reward"] for one in group["result"]["trajectories"]])
        group["advantages"] = (rewards - rewards.mean()).tolist()


def other_group(content: Arrays, head: Line) -> None:
    head["groups"][0]["result"]["key"][0] = "feedfeedfeedfeed"


def other_prompt(content: Arrays, head: Line) -> None:
    content["token/tokens"][0] += 1


def truncated(run: Path) -> None:
    replaced(run / "metrics.jsonl", (run / "metrics.jsonl").read_bytes()[:-400])


def a_line_less(run: Path) -> None:
    lines(run / "metrics.jsonl", lambda content: content[:3] + content[4:])


def last_line_less(run: Path) -> None:
    lines(run / "metrics.jsonl", lambda content: content[:-1])


def histogram(run: Path) -> None:
    lines(run / "metrics.jsonl", lambda content: content[4].update({"staleness/histogram": [16]}))


def busy_instead(run: Path) -> None:
    def change(content: list[Line]) -> None:
        for line in content[:6]:
            for spans in (spans for name, spans in line["spans"].items() if name.startswith("trainer")):
                spans[:] = [["busy", *span[1:]] for span in spans]

    lines(run / "timeline.jsonl", change)


def resealed(run: Path) -> None:
    """A checkpoint with another step, and a seal that fits it."""
    path = run / "checkpoints" / "step-000004" / "manifest.json"
    content = json.loads(path.read_text())
    content["step"] = 6
    replaced(path, json.dumps(content).encode())


def a_file_less(run: Path) -> None:
    (run / "checkpoints" / "step-000004" / "payloads.json").unlink()
