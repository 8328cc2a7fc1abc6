"""SIGKILLs every kind of process of a local run, and checks how the run ends, what it leaves behind, and that
it can be resumed.

    python -m benchmarks.kills [--kinds 'raylet;reaper'] [--times 2] [--directory DIR]
                               [--profile agent-guess+partial-rollout]
    python -m benchmarks.kills --kinds 'any;any, restarts' --times 10        random processes at random times
    python -m benchmarks.kills --chain --kinds any --times 3 --directory DIR   the same run again and again
    python -m benchmarks.kills --servers 2 [--engine vllm] --kinds 'server;at servers' --times 5
    python -m benchmarks.kills --set rollout.engine=vllm --set lora.rank=8 --kinds driver

Each kill has its own short run, with a model that is made once. With `--chain` all kills of a kind hit one
long run in DIR, also over several calls, so a run that survives a kill need not be started again for the next
one. A row is right if
- a run that cannot go on ends within 15 s with one `error:` line and a hint, any other ends normally (in a
  chain: trains on);
- none of its processes is left, and nothing in its temporary directory or in /dev/shm;
- after the resume every group of the history that counts was trained once, and none is missing, and
  `asyncrl audit` finds nothing wrong with groups, ledger, windows, staleness, loads and advantages (idle
  times differ where everything waits for cores).

With `--servers` runs generate at so many of `asyncrl serve` (`rollout.engine = "remote"`). A killed server
comes back after some seconds, at the same port and with the model's own weights.

It kills only descendants of the runs that it started, and these servers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tests.engines.remote.server_world import Served, serving
from tests.run.commands import SMALL, arguments, command_line, descendants, lines, wait_until_gone
from tests.run.test_remote import CLAIMS, FLOAT, MODEL, remote_sets

STEPS = 40
"""Enough for a run to be still under way when its process is killed."""
GROUPS = 4
ENDS_WITHIN_S = 15.0
CLEAN_WITHIN_S = 10.0
RUN_LIMIT_S = 240.0
TORCHS_CACHE = "torchinductor_"
SETS = (*SMALL, f"run.train_steps={STEPS}")
LONG = (*SMALL, "run.train_steps=10000")
GOES_ON_S = 12.0
"""A run of a chain that lives so long after a kill, and trains, goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """`is_victim(pid, process id of the driver)`; `goes_on`: the run ends in order all the same, or, if None,
    may; `codes`: else one of these.

    A driver that waits for a gcs_server while it starts can only be killed."""

    name: str
    is_victim: Callable[[int, int], bool]
    sets: tuple[str, ...] = ()
    goes_on: bool | None = False
    while_starting: bool = False
    needs_worker: bool = False
    codes: tuple[int, ...] = (1,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`ended_s` after the kill, with `code`; 0 of both while the run trains on."""

    kind: str
    victim: str
    at_step: int
    ended_s: float = 0.0
    code: int = 0
    errors: int = 0
    error: str = ""
    hint: str = ""
    left: str = ""
    resumed: str = ""

    def is_right(self, kind: Kind) -> bool:
        in_order = self.code == 0 and self.errors == 0
        ended = (
            self.code in kind.codes and self.errors == 1 and bool(self.hint) and self.ended_s <= ENDS_WITHIN_S
        )
        may_go_on = kind.goes_on is None or kind.while_starting  # its work may have been done already
        told = in_order if kind.goes_on else ended or (in_order and may_go_on)
        return told and not self.left and self.resumed.startswith("ok")


def named(word: bytes) -> Callable[[int, int], bool]:
    return lambda pid, driver: pid != driver and word in command_line(pid)


def called(name: str) -> Callable[[int, int], bool]:
    def is_victim(pid: int, driver: int) -> bool:
        try:
            return Path(f"/proc/{pid}/comm").read_text().strip() == name
        except OSError:
            return False

    return is_victim


RESTARTS = ("rollout.max_restarts=1",)
KINDS = (
    Kind(name="driver", is_victim=lambda pid, driver: pid == driver, codes=(-signal.SIGKILL,)),
    Kind(name="trainer", is_victim=named(b"ray::RankHost")),
    Kind(name="rollout", is_victim=named(b"ray::RolloutHost")),
    Kind(name="rollout, restarts", is_victim=named(b"ray::RolloutHost"), sets=RESTARTS, goes_on=True),
    Kind(name="reward", is_victim=named(b"child_host reward"), goes_on=True),
    Kind(name="gym", is_victim=named(b"tasks.gym"), while_starting=True),
    Kind(name="gcs_server", is_victim=called("gcs_server")),
    Kind(name="gcs_server, restarts", is_victim=called("gcs_server"), sets=RESTARTS),
    Kind(
        name="gcs_server, starting",
        is_victim=called("gcs_server"),
        while_starting=True,
        needs_worker=True,
        codes=(1, -signal.SIGKILL),
    ),
    Kind(name="raylet", is_victim=called("raylet")),
    Kind(name="raylet, restarts", is_victim=called("raylet"), sets=RESTARTS),
    Kind(name="raylet, starting", is_victim=called("raylet"), while_starting=True, needs_worker=True),
    Kind(name="agent", is_victim=called("cat")),
    Kind(name="agent, restarts", is_victim=called("cat"), sets=RESTARTS),
    Kind(name="reaper", is_victim=named(b"reaper.py"), goes_on=True),
)
RANDOM_KINDS = tuple(
    Kind(name=name, is_victim=lambda pid, driver: True, sets=sets, goes_on=None, codes=(1, -signal.SIGKILL))
    for name, sets in (("any", ()), ("any, restarts", ("rollout.max_restarts=1000",)))
)
SERVERS = "rollout.max_restarts=1000"
SERVERS_KINDS = (
    Kind(name="server", is_victim=named(b"asyncrl_cli\0serve"), sets=(SERVERS,), goes_on=True),
    Kind(
        name="at servers",
        is_victim=lambda pid, driver: pid == driver or named(b"ray::R")(pid, driver),
        sets=(SERVERS,),
        goes_on=None,
        codes=(1, -signal.SIGKILL),
    ),
)
"""Only with `--servers`: one of them, or a process of a run that generates there."""
AGENTS_KINDS = (Kind(name="tools", is_victim=named(b"child_host environment"), goes_on=True),)
"""Only with a profile whose episodes have tools."""


class Laboratory:
    """A directory with one cache, and one temporary directory whose content is the runs' alone."""

    def __init__(self, directory: Path, temporary: Path, profile: str, rng: random.Random) -> None:
        self.directory = directory
        self.profile = profile
        self.temporary = temporary
        self.rng = rng
        self.number = 0
        self.started: list[subprocess.Popen[str]] = []
        self.long: dict[str, subprocess.Popen[str] | None] = {}
        self.servers: list[Served] = []
        self.sets = SETS

    def start(self, *words: str, sets: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        own = {
            "OMP_NUM_THREADS": "1",
            "XDG_CACHE_HOME": str(self.directory / "cache"),
            "TMPDIR": str(self.temporary),
        }
        with self._said(len(self.started)).open("w") as err:
            process = subprocess.Popen(
                arguments(*words, sets=sets, verbose=False),
                cwd=self.directory,
                env=os.environ | own,
                stdout=subprocess.DEVNULL,
                stderr=err,
                text=True,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def _said(self, number: int) -> Path:
        return self.directory / f"stderr-{os.getpid()}-{number}"

    def said(self, process: subprocess.Popen[str]) -> str:
        return self._said(self.started.index(process)).read_text()

    def close(self) -> None:
        """No run outlives the experiment."""
        for process in self.started:
            process.kill()

    def kill(self, kind: Kind) -> Row:
        """Kill a short run, and resume it to its end."""
        self.number += 1
        name = f"run-{self.number}-{os.getpid()}"
        run = self.directory / "runs" / name
        process = self.start(
            "train", "--profile", self.profile, "--name", name, "--ui", "plain", sets=(*self.sets, *kind.sets)
        )
        row = self._killed(kind, process, run, self.rng.randint(2, 5), is_long=False)
        return replace(row, resumed=self._resumed(run, process.returncode))

    def kill_again(self, kind: Kind) -> Row:
        """Kill the long run of that kind, if it still goes on after the last kill; else begin or resume it,
        and kill it."""
        run = self.directory / "runs" / kind.name.replace(", ", "-")
        process = self.long.get(kind.name) or self._begun(kind, run)
        steps = len(lines(run / "metrics.jsonl"))
        row = self._killed(kind, process, run, steps + self.rng.randint(1, 4), is_long=True)
        self.long[kind.name] = process if process.poll() is None else None
        return row if process.poll() is None else replace(row, resumed=trained_once(run, 0))

    def _begun(self, kind: Kind, run: Path) -> subprocess.Popen[str]:
        """What was trained before counts as far as it is resumed."""
        before = num_resumed(run)
        if any((run / "checkpoints").glob("step-*")):
            process = self.start("resume", run.name, "--ui", "plain")
            self._wait_for(process, lambda: num_resumed(run) > before)
            return process
        words = ("--profile", self.profile, "--name", run.name, "--ui", "plain")
        return self.start("train", *words, sets=(*LONG, *kind.sets))

    def _killed(
        self, kind: Kind, process: subprocess.Popen[str], run: Path, at_step: int, *, is_long: bool
    ) -> Row:
        shared = set(os.listdir("/dev/shm"))
        if not kind.while_starting:
            self._wait_for(process, lambda: len(lines(run / "metrics.jsonl")) >= at_step)
            time.sleep(self.rng.random())
        steps = len(lines(run / "metrics.jsonl"))
        family, victim = self._kill_one(process, kind)
        killed_s = time.monotonic()
        row = Row(kind=kind.name, victim=victim, at_step=steps)
        if is_long and self._goes_on(process, run):
            return replace(row, resumed="ok: trains on")
        process.wait(RUN_LIMIT_S)
        ended_s = time.monotonic() - killed_s
        left = [
            command_line(pid).replace(b"\0", b" ").decode()[:40]
            for pid in wait_until_gone(family, CLEAN_WITHIN_S)
        ]
        left += [name for name in os.listdir(self.temporary) if not name.startswith(TORCHS_CACHE)]
        left += [
            file
            for file in os.listdir("/dev/shm")
            if file not in shared and file.startswith(("psm_", "plasma"))
        ]
        err = self.said(process).splitlines()
        errors = [line for line in err if line.startswith("error:")]
        hints = [line for line in err if line.startswith("hint:")]
        return replace(
            row,
            ended_s=round(ended_s, 1),
            code=process.returncode,
            errors=len(errors),
            error=" | ".join(errors),
            hint=" | ".join(hints),
            left=", ".join(left),
        )

    def _goes_on(self, process: subprocess.Popen[str], run: Path) -> bool:
        """Whether the run still lives `GOES_ON_S` after the kill. It must train then: raises AssertionError
        for one that hangs."""
        with suppress(subprocess.TimeoutExpired):
            process.wait(GOES_ON_S)
            return False
        steps = len(lines(run / "metrics.jsonl"))
        self._wait_for(
            process, lambda: process.poll() is not None or len(lines(run / "metrics.jsonl")) > steps
        )
        return process.poll() is None

    def _wait_for(self, process: subprocess.Popen[str], is_so: Callable[[], bool]) -> None:
        end_s = time.monotonic() + RUN_LIMIT_S
        while not is_so():
            assert process.poll() is None, self.said(process)
            assert time.monotonic() < end_s, "the run does not get on"
            time.sleep(0.05)

    def _kill_one(self, process: subprocess.Popen[str], kind: Kind) -> tuple[set[int], str]:
        """Returns all processes of the run, and what the killed one was."""
        end_s = time.monotonic() + RUN_LIMIT_S
        while True:
            family = descendants(process.pid)
            if kind.needs_worker and not any(b"ray::" in command_line(pid) for pid in family):
                family = set()  # Ray has not started yet
            servers = {server.process.pid: server for server in self.servers}
            victims = [pid for pid in (process.pid, *family, *servers) if kind.is_victim(pid, process.pid)]
            if victims:
                victim = self.rng.choice(victims)
                name = shown(victim)
                orphans = descendants(victim) if victim in servers else set()
                os.kill(victim, signal.SIGKILL)
                if victim in servers:
                    servers[victim].end()
                    assert not wait_until_gone(orphans, CLEAN_WITHIN_S), "the server's engine outlives it"
                    time.sleep(self.rng.uniform(1, 10))
                    servers[victim].start()
                print(f"{kind.name}: {name}", file=sys.stderr, flush=True)
                return family, name
            assert process.poll() is None, self.said(process)
            assert time.monotonic() < end_s, f"there is no {kind.name}"
            time.sleep(0.02)

    def _resumed(self, run: Path, code: int) -> str:
        if not list((run / "checkpoints").glob("step-*")):
            return "ok: it had not begun"
        if code != 0:
            resumed = self.start("resume", run.name, "--ui", "plain")
            if resumed.wait(RUN_LIMIT_S) != 0:
                return f"exit code {resumed.returncode}: {self.said(resumed)[-300:]}"
        once = trained_once(run)
        audit = subprocess.run(
            arguments("audit", run.name, "--json"), cwd=self.directory, stdout=subprocess.PIPE, text=True
        )
        wrong = [
            claim["name"]
            for claim in json.loads(audit.stdout)["claims"]
            if claim["name"] in CLAIMS and claim["verdict"] != "holds"
        ]
        return f"the audit of {', '.join(wrong)} fails; {once}" if wrong else once


def shown(pid: int) -> str:
    """The beginning of its command line, of paths the last parts."""
    return " ".join(word.rpartition("/")[2] for word in command_line(pid).decode().split("\0"))[:60]


def num_resumed(run: Path) -> int:
    return sum(event["event"] == "resumed" for event in lines(run / "events.jsonl"))


def trained_once(run: Path, steps: int = STEPS) -> str:
    """`ok`, or what is wrong with the history that counts: a resume undoes what was trained after the step
    that it starts from. `steps`: of the run; 0 for those that it has trained."""
    counted: list[dict[str, object]] = []
    for event in lines(run / "events.jsonl"):
        if event["event"] == "resumed":
            counted = [old for old in counted if old["step"] <= event["from_step"]]
        elif event["event"] == "trained":
            counted.append(event)
    times = Counter((event["uid"], event["epoch"]) for event in counted)
    twice, wanted = (
        sum(number > 1 for number in times.values()),
        GROUPS * (steps or len({event["step"] for event in counted})),
    )
    if twice or len(counted) != wanted:
        return f"{twice} groups twice, {len(counted)} of {wanted} trained"
    return f"ok: {len(counted)} once"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kinds", default=";".join(kind.name for kind in KINDS), help="names separated by semicolons"
    )
    parser.add_argument("--times", type=int, default=2, help="kills per kind")
    parser.add_argument(
        "--directory", type=Path, help="directory for runs, the model and kills.jsonl (default: temporary)"
    )
    parser.add_argument("--profile", default="partial-rollout")
    parser.add_argument(
        "--chain",
        action="store_true",
        help="kill one run in DIRECTORY again and again, also over several calls",
    )
    parser.add_argument("--servers", type=int, default=0)
    parser.add_argument("--engine", choices=["transformers", "vllm"], default="transformers")
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE for all runs")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    wanted = options.kinds.split(";")
    # not without killing the run that it has started
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
    with ExitStack() as ending:
        scratch, temporary = (
            ending.enter_context(tempfile.TemporaryDirectory(prefix=prefix)) for prefix in ("kills-", "k")
        )
        directory = (options.directory or Path(scratch)).absolute()
        directory.mkdir(parents=True, exist_ok=True)
        laboratory = Laboratory(directory, Path(temporary), options.profile, random.Random(options.seed))
        for _ in range(options.servers):
            token_file = laboratory.temporary.with_name(f"{laboratory.temporary.name}.token")
            served = serving(token_file, MODEL, *SMALL, FLOAT, engine=options.engine)
            laboratory.servers.append(ending.enter_context(served))
        laboratory.sets = (*SETS, *options.set)
        if laboratory.servers:
            laboratory.sets += remote_sets(directory, *laboratory.servers)
        ending.callback(laboratory.close)
        wrong = 0
        for kind in [
            kind
            for kind in (*KINDS, *AGENTS_KINDS, *RANDOM_KINDS, *SERVERS_KINDS)
            if kind.name in wanted
            for _ in range(options.times)
        ]:
            row = (laboratory.kill_again if options.chain else laboratory.kill)(kind)
            wrong += not row.is_right(kind)
            with (directory / "kills.jsonl").open("a") as table:
                table.write(json.dumps(asdict(row)) + "\n")
            verdict = "" if row.is_right(kind) else "  WRONG"
            print(
                f"{kind.name:22} {row.victim:60} step {row.at_step} {row.ended_s:5.1f} s, exit {row.code:3}, "
                f"{row.resumed}{verdict}"
            )
            for line in (
                row.error or "no error line",
                row.hint or "no hint",
                row.left and f"left: {row.left}",
            ):
                print(f"    {line}" if line else "", flush=True)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
