"""Bad input by the table: for each, one error with a reason and an exit code within seconds; never "a bug", a
traceback or a wait.

(name, how it is made, command, exit code, a word of the error). `{runs}`, `{root}`, ... in a command are
places of the spoilt copy. Whatever is refused leaves the disk as it was.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from asyncrl_cli.cli.app import run
from asyncrl_cli.profile.keys import sections
from tests.bad_input.made import (
    DELETE,
    NAME,
    Place,
    copied,
    edit_json,
    listing,
    make_place,
    replace,
    reseal,
    seal_by_hand,
    set_at,
)
from tests.marks import one_in

LIMIT_S = 60
CPU_LIMIT_S = 10
"""CPU seconds of one command. Other processes that use the core do not count."""
RANK_FILE = "rank-00000.safetensors"
Make = Callable[[Place], Any]


@dataclass(frozen=True)
class Case:
    """`code` is a tuple where the place, or the machine, decides."""

    name: str
    command: str | list[str]
    make: Make
    code: int | tuple[int, ...]
    word: str = ""
    hint: bool = True
    changes: bool = False
    environ: tuple[tuple[str, str], ...] = ()


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Place:
    import_module("asyncrl_cli.models.saved_form")  # seconds, which are no case's own
    return make_place(tmp_path_factory.mktemp("made"))


@pytest.fixture
def place(original: Place, tmp_path: Path) -> Place:
    return copied(original, tmp_path / "copy")


# --- how things are spoilt


def nothing(place: Place) -> None:
    pass


DEEP = json.loads("[" * 400 + "]" * 400)
LONG = 10**4000


def json_in(file: str, path: str, value: Any) -> Make:
    def make(place: Place) -> None:
        edit_json(place.newest / file, set_at(path, value))
        reseal(place.newest)

    return make


def text_in(file: str, content: bytes) -> Make:
    def make(place: Place) -> None:
        replace(place.newest / file, content)
        reseal(place.newest)

    return make


def manifest_with(path: str | Sequence[str], value: Any) -> Make:
    def make(place: Place) -> None:
        content = json.loads((place.newest / "manifest.json").read_text())
        seal_by_hand(place.newest, set_at(path, value)(content))

    return make


def written(path: str, content: bytes) -> Make:
    """`path` below the copy's root."""

    def make(place: Place) -> None:
        (place.root / path).parent.mkdir(parents=True, exist_ok=True)
        replace(place.root / path, content)

    return make


def replaced(path: str, kind: str) -> Make:
    """Something that is no file in place of the file `path`, below the copy's root."""

    def make(place: Place) -> None:
        target = place.root / path
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        target.unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(target)
        elif kind == "directory":
            target.mkdir()
        elif kind == "device":
            target.symlink_to("/dev/zero")
        elif kind == "loop":
            target.symlink_to(target.name)
        elif kind == "socket":
            with socket.socket(socket.AF_UNIX) as server:
                here = os.open(target.parent, os.O_RDONLY)
                server.bind(f"/proc/self/fd/{here}/{target.name}")
                os.close(here)
        elif kind == "large":
            with target.open("wb") as file:
                file.truncate(2**40)

    return make


def all_of(*makes: Make) -> Make:
    def make(place: Place) -> None:
        for one in makes:
            one(place)

    return make


# --- the table

RESUME = f"resume {NAME} --runs-dir {{runs}}"
EXPORT = "export {newest} --runs-dir {runs} --out {root}/exported"
NEWEST = "runs/otter/checkpoints/step-000006"
KINDS = ("pipe", "directory", "device", "loop", "socket")
NO_JSON = (b"", b"null", b"[]", b"3", b'"x"', b"\xff\xfe", b"{", b"[" * 10**6, b'{"a":' * 10**5, b"9" * 10**5)
JSON_VALUES = (DELETE, None, [], {}, "x", -1, 1.5, True, LONG, "\ud800")


def checkpoints() -> Iterator[Case]:
    groups, observers = "loop_state.groups", "loop_state.observers"
    ledger, first = f"{groups}.ledger", f"{groups}.finished.0.result"
    places = {
        "loop_state.json": f"""schema_version loop_state loop_state.step {groups} {groups}.finished
            {groups}.running.0
            {ledger} {ledger}.admitted_total {ledger}.ended {ledger}.ended.trained {first}.key
            {first}.trajectories.0.version_tokens {observers} {observers}.0.metrics.run
            {observers}.0.live.rewards""",
        "payloads.json": "schema_version groups groups.0.uid groups.0.trajectories",
        "config.resolved.json": "schema_version profile profile.rollout profile.rollout.n",
    }
    for file, paths in places.items():
        for path in paths.split():
            for value in (DELETE, None, "x", -1, LONG) if path.count(".") > 1 else JSON_VALUES:
                if not (path == "schema_version" and value is True):
                    yield Case(f"{file} {path} {shown(value)}", RESUME, json_in(file, path, value), 4)
    for file in (*places, "trainer.json"):
        command = EXPORT if file == "trainer.json" else RESUME
        for content in NO_JSON:
            yield Case(f"{file} is {content[:8]!r}", command, text_in(file, content), 4, file)
    size = ("files", "loop_state.json", "bytes")
    for path in (["step"], ["version"], ["run"], ["profile"], ["files"], size):
        for value in (DELETE, None, [], "x", -1, LONG):
            if not (path[0] in ("run", "profile") and value == "x"):
                make = manifest_with(path, value)
                yield Case(f"manifest {'.'.join(path)} {shown(value)}", RESUME, make, 4, "refused")
    for name in ("../../profile.toml", "/etc/passwd", "", ".", "a\0b", "x" * 300):
        make = manifest_with(("files", name), {"bytes": 1, "sha256": "0" * 64})
        yield Case(f"manifest names {name[:20]!r}", RESUME, make, 4)
    for path in ("schema_version", "ranks", "step", "optimizer_steps", "has_window_first"):
        for value in (DELETE, None, "x", -1):
            make = json_in("trainer.json", path, value)
            yield Case(f"trainer.json {path} {shown(value)}", EXPORT, make, 4)
    for kind in KINDS:
        for file in (
            "manifest.json",
            "loop_state.json",
            "payloads.safetensors",
            "config.resolved.json",
            RANK_FILE,
        ):
            yield Case(f"{file} is a {kind}", RESUME, replaced(f"{NEWEST}/{file}", kind), 4)
    pickles = pickle.dumps({}), b"\x80\x05" + b"(" * 10**5, b"cos\nsystem\n(S'touch pwned'\ntR."
    for content in (b"", b"garbage", *pickles):
        yield Case(f"a rank's file is {content[:20]!r}", EXPORT, text_in(RANK_FILE, content), 4, RANK_FILE)
    for content in (b"", b"garbage", b"\xff" * 8, b"\0" * 8, (2**62).to_bytes(8, "little")):
        make = text_in("payloads.safetensors", content)
        yield Case(f"payloads.safetensors is {content[:8]!r}", RESUME, make, 4, "safetensors")
    yield Case("tensors are cut", EXPORT, text_in(RANK_FILE, b"PK\x03\x04"), 4, "cannot be read")
    none, outside = "resume {root} --runs-dir {runs}", "resume {root}/step-000006 --runs-dir {runs}"
    yield Case("a run that is none", none, nothing, 4, "neither a run nor a checkpoint")
    yield Case("a checkpoint outside of its run", outside, moved_out, 4, "is not a run directory")
    yield Case("checkpoints is a file", RESUME, replaced("runs/otter/checkpoints", "pipe"), (2, 4))
    yield Case("status of a checkpoint", "status {newest} --runs-dir {runs}", nothing, (2, 4))


def moved_out(place: Place) -> None:
    shutil.copytree(place.newest, place.root / place.newest.name)


def shown(value: Any) -> str:
    return "a long number" if value is LONG else ascii(value)[:20]


def statuses() -> Iterator[Case]:
    commands = ("status otter --runs-dir {runs}", "status --runs-dir {runs}", "stop otter --runs-dir {runs}")
    for content in (*NO_JSON, b"true", b"{}", b'{"schema_version": 1}'):
        for command in commands:
            make = written("runs/otter/status.json", content)
            yield Case(f"{command[:13]} {content[:20]!r}", command, make, 4, "status.json")
    for kind in (*KINDS, "large"):
        for command in commands:
            yield Case(f"{command[:13]} of a {kind}", command, replaced("runs/otter/status.json", kind), 4)
    paths = """phase pid host updated_at progress progress.step progress.time_s executors executors.0
        executors.0.state_s utilization utilization.slot_history staleness versions eval.history notes totals
        ledger"""
    for path in paths.split():
        for value in (DELETE, None, "x", -1, LONG, "\ud800"):
            if (path, value) not in (("phase", "x"), ("host", "x"), ("executors.0", DELETE)):
                make = json_file("runs/otter/status.json", path, value)
                yield Case(f"status {path} {shown(value)}", commands[0], make, 4, "status.json")


def json_file(file: str, path: str, value: Any) -> Make:
    return lambda place: edit_json(place.root / file, set_at(path, value))


def profiles() -> Iterator[Case]:
    dry = "train --profile {root}/bad.toml --dry-run"
    head = b'extends = "base"\n'
    params, threshold = head + b"[task.params]\na = ", head + b"[async_training]\nstaleness_threshold = "
    ratio = head + b'[placement]\nratio = "%b"\n'
    keys = b"\n".join(b"key%d = 1" % number for number in range(60_000))
    texts: dict[str, tuple[bytes, str]] = {
        "empty table": (b"[run\n", "bad.toml:1"),
        "no text": (b"\xff\xfe\x00", "UTF-8"),
        "a NUL": (head + b'purpose = "\x00"\n', "bad.toml"),
        "a deep array": (params + b"[" * 10_000 + b"]" * 10_000, "deep"),
        "a fairly deep array": (params + b"[" * 100 + b"]" * 100, "deep"),
        "a deep inline table": (params + b"{a=" * 10_000 + b"1" + b"}" * 10_000, "deep"),
        "a deep table": (head + b"[" + b".".join([b"a"] * 5_000) + b"]\n", "deep"),
        "a long number": (head + b"[run]\nseed = " + b"9" * 5_000, "cannot be read"),
        "a long hexadecimal number": (head + b"[run]\nseed = 0x" + b"f" * 50_000, "a very long number"),
        "a long exponent": (head + b"[trainer]\nlr = 1e" + b"9" * 50, "trainer.lr = inf"),
        "a small eta": (threshold + b"1e-999999\n", "1e-999999 is too small"),
        "an eta of a million digits": (threshold + b"0." + b"3" * 10**5, "staleness_threshold"),
        "many unknown keys": (keys, "unknown key"),
        "many unknown keys of a section": (b"[run]\n" + keys, "unknown key"),
        "a long unknown key": (head + b"a" * 500_000 + b" = 1\n", "unknown key"),
        "10 MB": (b"# " + b"x" * 10**7, "bytes"),
        "extends itself": (b'extends = "bad.toml"\n', "cycle"),
        "extends a number": (b"extends = 3\n", "extends = 3"),
        "extends a long number": (b"extends = 0x" + b"f" * 50_000, "extends = a very long number"),
        "extends a long name": (b'extends = "' + b"x" * 5_000 + b'"\n', "no profile"),
        "extends a long file": (b'extends = "' + b"x" * 5_000 + b'.toml"\n', "does not exist"),
        "extends a directory": (b'extends = "./"\n', "is a directory"),
        "extends a user's file": (b'extends = "~nobody-here/x.toml"\n', "does not exist"),
        "extends null": (b'extends = "a\\u0000b.toml"\n', "does not exist"),
        "a section is a value": (b"run = " + b"9" * 300, "run is a section"),
        "a value is a section": (head + b"[run.seed]\na = 1\n", "run.seed"),
        "a section is an array": (head + b"[[run]]\nseed = 1\n", "run is a section"),
        "a date": (head + b"[run]\nseed = 1979-05-27\n", "run.seed"),
        "not a number": (head + b"[trainer]\nlr = nan\n", "trainer.lr"),
        "infinite": (head + b"[trainer]\nlr = inf\n", "trainer.lr"),
        "a number as its name": (b"name = 3\n" + head, "name = 3"),
        "a path with a NUL": (head + b'[model]\npath = "a\\u0000b"\n', "model.path"),
        "a long path": (head + b'[model]\npath = "/' + b"x" * 300 + b'"\n', "model.path"),
        "a long task": (head + b'[task]\nsource = "jsonl:' + b"x" * 300 + b'"\n', "task.source"),
        "a long directory": (head + b'[model]\ncache_dir = "' + b"x/" * 5_000 + b'"\n', "model.cache_dir"),
        "a long name of the run": (head + b'[run]\nname = "' + b"x" * 300 + b'"\n', "run.name"),
        "a ratio of long numbers": (ratio % (b"1:" + b"9" * 5_000), "placement.ratio"),
        "a ratio of other digits": (ratio % "\u0661:\u0662".encode(), "placement.ratio"),
    }
    for name, (content, word) in texts.items():
        yield Case(f"profile: {name}", dry, written("bad.toml", content), 2, word)
    for kind in KINDS:
        yield Case(f"profile is a {kind}", dry, replaced("bad.toml", kind), 2, "bad.toml")
    make = all_of(written("bad.toml", b'extends = "base.toml"'), replaced("base.toml", "pipe"))
    yield Case("profile extends a pipe", dry, make, 2)
    yield Case("profile extends a thousand", dry, long_chain, 2, "more than 16 files")
    for reference in ("", "x" * 300, "x" * 300 + ".toml", "/", "~nobody-here/x.toml", "a/" * 3000 + "x.toml"):
        name = f"--profile {reference[:20]!r} {len(reference)}"
        yield Case(name, f"train --dry-run --profile {reference}", nothing, 2)
    yield Case("profiles show a pipe", "profiles show {root}/bad.toml", replaced("bad.toml", "pipe"), 2)


def long_chain(place: Place) -> None:
    for number in range(1000):
        (place.root / f"p{number}.toml").write_text(f'extends = "p{number + 1}.toml"\n')
    (place.root / "bad.toml").write_text('extends = "p0.toml"\n')


def sets() -> Iterator[Case]:
    plan = "plan -p base --gpus 0"
    for key in integer_keys():
        for value in ("9223372036854775808", "1e308", "9" * 5000):
            yield Case(f"--set {key}={value[:12]}", f"{plan} --set {key}={value}", nothing, 2)
    # fmt: off
    for text in (
        "", "=", "a", ".=1", "run=", "run..seed=1", "x" * 100_000 + "=1", "run.seed=" + "[" * 50_000,
        "task.params.a=" + "[" * 50_000 + "]" * 50_000, "task.params.a=" + "{b=" * 5_000 + "1" + "}" * 5_000,
        ".".join(["a"] * 10_000) + "=1", "model.path=" + "x" * 300, "rollout.stop=[1]", "trainer.betas=[1]",
        "async_training.staleness_threshold=1e-99999", "async_training.staleness_threshold=1e99999",
        "task.source=jsonl:" + "x" * 5_000, "run.name=" + "x" * 300, "trainer.betas=[1,2,3]",
        "run.seed=1\nname=2",
    ):
        yield Case(f"--set {text[:30]!r} {len(text)}", [*plan.split(), "--set", text], nothing, 2)
    for name, value in (
        ("", "1"), ("X" + "Y" * 5_000, "1"), ("RUN", "[" * 5_000), ("RUN__SEED", "9" * 5_000),
        ("RUN__SEED", "[" * 50_000), ("RUN__SEED__X", "1"), ("TASK__PARAMS", "{" * 5_000),
        ("TASK__PARAMS", "[" * 50_000), ("MODEL__PATH", "x" * 5_000),
    ):
        yield Case(f"{name[:20]}={value[:8]}", plan, nothing, 2, environ=((f"ASYNCRL_{name}", value),))
    # fmt: on
    many = tuple((f"ASYNCRL_KEY{number}", "1") for number in range(3_000))
    yield Case("3,000 unknown names in the environment", plan, nothing, 2, "unknown name", environ=many)


def integer_keys() -> list[str]:
    from asyncrl_cli.profile.validation import expected

    return [
        key
        for section, kind in sections().items()
        for name in kind.model_fields
        if expected(key := f"{section}.{name}").startswith("an integer") and key != "run.train_steps"
    ]


def names() -> Iterator[Case]:
    for name in ("x" * 256, "x" * 5_000, "a/" * 3_000, "ü" * 200):
        for command in ("status", "stop", "logs", "resume", "export"):
            yield named(f"{command} NAME --runs-dir {{runs}}", name, (2, 4))
        for command in ("status", "stop x", "logs x", "resume x", "export x"):
            yield named(f"{command} --runs-dir NAME", name, (2, 4))
        for command in ("train -p base --dry-run --name", "tune", "bench --simulate"):
            yield named(f"{command} NAME", name, 2)
        yield named("init NAME x", name, 2)
    for name in ("x" * 256, "a/" * 3_000):
        yield named("init jsonl {root}/NAME", name, (2, 4))
        yield named(f"export {NAME} --runs-dir {{runs}} --out {{root}}/NAME", name, (1, 2, 4))
        yield named("tune laptop-tiny --out NAME.toml", name, (2, 4))
        yield named("bench --simulate laptop-tiny --groups 64 --out NAME", name, (1, 2, 4))
    yield Case("init into a file", "init jsonl {root}/prompts.jsonl", nothing, 4)
    yield Case("init below a file", "init jsonl {root}/prompts.jsonl/x", nothing, (1, 4), hint=False)
    yield Case("init into a pipe", "init jsonl {root}/pipe", replaced("pipe", "pipe"), 4)
    in_loop = "init jsonl {root}/loop"
    yield Case("init into a loop of links", in_loop, replaced("loop", "loop"), (1, 4), hint=False)
    yield Case("init into what is not ours", "init jsonl /proc/asyncrl", nothing, (1, 4), hint=False)
    yield Case("runs-dir is a file", "status --runs-dir {root}/prompts.jsonl", nothing, 2)
    yield Case("runs-dir is a pipe", "status x --runs-dir {root}/pipe", replaced("pipe", "pipe"), 2)
    export = "export otter --runs-dir {runs}"
    yield Case("export into a file", f"{export} --out {{root}}/prompts.jsonl", nothing, 4)
    yield Case("export below a file", f"{export} --out {{root}}/prompts.jsonl/x", nothing, (1, 4))
    yield Case("export with a model that is a file", f"{export} --model {{root}}/prompts.jsonl", nothing, 2)


def named(command: str, name: str, code: int | tuple[int, ...]) -> Case:
    """`command` with `name` for its NAME."""
    given = [part.replace("NAME", name) for part in command.split()]
    return Case(f"{command}: {ascii(name)[:12]} {len(name)}", given, nothing, code)


def logs() -> Iterator[Case]:
    logs, stop = "logs otter --runs-dir {runs}", "stop otter --runs-dir {runs}"
    for kind in KINDS:
        log = replaced("runs/otter/logs/attempt-1/driver.log", kind)
        yield Case(f"log is a {kind}", logs, log, (2, 4))
        if kind != "directory":
            yield Case(f"logs/latest is a {kind}", logs, replaced("runs/otter/logs/latest", kind), 2)
        yield Case(f"stop is a {kind}", stop, replaced("runs/otter/stop", kind), 4)
        yield Case(f"lock is a {kind}", stop, replaced("runs/otter/lock", kind), 4)


def models() -> Iterator[Case]:
    """A model's own files; the task is small, and Ray is not reached."""
    train = "train --profile {root}/spoilt.toml --runs-dir {runs} --name x"

    def with_model(make: Make) -> Make:
        def both(place: Place) -> None:
            make(place)
            text = (place.root / "profile.toml").read_text()
            text = re.sub(r'(?m)^path = ".*"', f'path = "{place.model}"', text)
            (place.root / "spoilt.toml").write_text(text)

        return both

    for file in ("config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        for kind in KINDS:
            yield Case(f"{file} is a {kind}", train, with_model(replaced(f"model/{file}", kind)), 3)
        for content in (b"", b"null", b"[]", b"3", b"\xff", b"[" * 10**5, b"9" * 10**5):
            if file != "tokenizer_config.json" or content != b"3":
                make = with_model(written(f"model/{file}", content))
                yield Case(f"{file} is {content[:8]!r}", train, make, 3)
    yield Case("tokenizer.json is {}", train, with_model(written("model/tokenizer.json", b"{}")), 3)
    index = "model/model.safetensors.index.json"
    values = (
        *({"a": value} for value in (3, None, ["b"], "../x", "/etc/passwd", "x" * 300)),
        None,
        [],
        3,
        "x",
        {},
    )
    for value in values:
        content = json.dumps({"weight_map": value}).encode()
        yield Case(f"weight_map {value!r:.30}", train, with_model(written(index, content)), 3)
    for content in (b"", b"null", b"[]", b"{}", b"[" * 10**5):
        yield Case(f"index is {content[:8]!r}", train, with_model(written(index, content)), 3)
    for key, values in {
        "model_type": (None, 3, [], {}, "", "no-such-model", "x" * 5000),
        "hidden_size": (None, "x", [], -1, 0, 2**63, 1e308),
        "num_attention_heads": ("x", 0, -1, 2**63),
        "num_hidden_layers": ("x", -1, 2**40),
        "vocab_size": ("x", -1, 0, 2**63),
    }.items():
        for value in values:
            make = with_model(json_file("model/config.json", key, value))
            yield Case(f"config.json {key} {value!r:.20}", train, make, 3)
            plan = "plan --profile {root}/spoilt.toml --gpus 0"
            yield Case(f"plan of {key} {value!r:.20}", plan, make, (0, 3), hint=False)


def tunes() -> Iterator[Case]:
    tune, workload = "tune {run}", "bench --simulate {root}/bad.toml"
    # A search without the events works: what each sync took is not known then.
    yield Case("tune events.jsonl null", tune, written("runs/otter/events.jsonl", b"null\n"), 0)
    for file in ("metrics.jsonl", "config.resolved.json"):
        for content in (b"null", b"[]", b"3", b'"x"', b"\xff", b"[" * 10**5, b"9" * 10**5, b"{"):
            make = written(f"runs/otter/{file}", content + b"\n")
            yield Case(f"tune {file} {content[:8]!r}", tune, make, 2, file)
    for file, kind in product(("metrics.jsonl", "events.jsonl", "config.resolved.json"), KINDS):
        yield Case(f"tune {file} is a {kind}", tune, replaced(f"runs/otter/{file}", kind), 2)
    texts = {
        "nothing": b"",
        "no table": b"lengths = 3\n",
        "deep": b"[profile.task.params]\na = " + b"[" * 10_000,
        "unknown": b"\n".join(b"key%d = 1" % number for number in range(60_000)),
        "long": b"[decoding]\nstep_s = " + b"9" * 5_000,
        "a list": b"[[lengths]]\n",
        "profiles is a list": b"profiles = [1]\n",
        "profile is a number": b"profile = 3\n",
        "10 MB": b"# " + b"x" * 10**7,
    }
    for name, content in texts.items():
        yield Case(f"workload: {name}", workload, written("bad.toml", content), 2)
    for kind in KINDS:
        yield Case(f"workload is a {kind}", workload, replaced("bad.toml", kind), 2)
    known = (Path(__file__).parents[2] / "profiles" / "workloads" / "laptop-tiny.toml").read_text()
    lines = """windows = 99999999999; windows = 0; step_s = -1.0; step_s = nan; step_s = "x"; step_s = 1e308;
        parameter_bytes = 0; distribution = "none\""""
    for wrong in map(str.strip, lines.split(";")):
        key = wrong.partition(" ")[0]
        text = re.sub(rf"(?m)^{key} = .*$", wrong, known)
        yield Case(f"workload {wrong}", workload, written("bad.toml", text.encode()), 2, key)


CASES = [*checkpoints(), *statuses(), *profiles(), *sets(), *names(), *logs(), *models(), *tunes()]


def test_there_are_at_least_two_hundred_and_each_has_a_name_of_its_own() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 200


@pytest.mark.timeout(LIMIT_S, func_only=True)
@pytest.mark.parametrize("case", one_in(8, CASES), ids=lambda case: case.name)
def test_bad_input_is_one_error_with_a_reason(
    case: Case, place: Place, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    case.make(place)
    places = {"root": place.root, "runs": place.runs, "run": place.run, "newest": place.newest}
    parts = case.command.split(" ") if isinstance(case.command, str) else case.command
    arguments = [
        re.sub(r"\{(root|runs|run|newest)\}", lambda found: str(places[found[1]]), part) for part in parts
    ]
    for name, value in case.environ:
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(place.root)
    before = listing(place.root)
    began_s = time.thread_time()
    code = run(arguments)
    assert time.thread_time() - began_s < CPU_LIMIT_S
    said = capsys.readouterr()
    codes = case.code if isinstance(case.code, tuple) else (case.code,)
    assert code in codes, said.err[-2000:]
    assert "Traceback" not in said.err
    assert "this is a bug" not in said.err, said.err[-2000:]
    assert listing(place.root) == before
    if code != 0:
        assert len(re.findall(r"(?m)^error: ", said.err)) == 1, said.err[-2000:]
        assert re.search(r"(?m)^hint: ", said.err) or not case.hint, said.err[-2000:]
        assert case.word in said.err.replace("\n", " "), said.err[-2000:]
        assert len(said.err) < 10_000
