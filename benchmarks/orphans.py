"""SIGKILLs rollout workers at random moments of a real run, and counts the data that has no owner then.

    python -m benchmarks.orphans [--backend transferqueue] [--kills 20] [--directory DIR] [--seed 0]

One small run (partial rollouts, restarts allowed) trains while its workers are killed, each time once all are
up again. Halfway the driver is killed, too, and the run is resumed. After the last kill it trains on for a
few steps and is stopped with Ctrl-C.

    orphans        found by sweeps: what a worker put and died before it reported it
    without owner  keys that the store holds after the last sweep, and no live group owns. Has to be 0
    left           processes of the run that live on. Has to be 0

Exits with 1 if one of the two is not 0, or the ledger does not add up. It kills only descendants of the run
that it started.
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
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.run.commands import SMALL, arguments, command_line, descendants, lines, wait_until_gone

MOVES_WITHIN_S = 180.0
STEPS_AFTER = 3
CLEAN_WITHIN_S = 30.0
SETS = (
    *SMALL,
    "run.train_steps=100000",
    "rollout.max_restarts=1000",
    "data_plane.storage_cpus_per_unit=0",
)
NAME, LEFT = "orphans", "ORPHANS_LEFT_FILE"


def as_child(words: list[str]) -> None:
    """The command itself. It writes down what the store holds after the last sweep."""
    from asyncrl_cli.cli.app import main
    from asyncrl_cli.job.driver_loop import DriverData
    from asyncrl_cli.loop.data_keys import DataKeys

    last_sweep, list_keys, held = DataKeys.last_sweep, DriverData.keys, list[str]()

    async def keys(data: DriverData) -> list[str]:
        held[:] = await list_keys(data)
        return [*held]

    async def sweep_and_look(data: DataKeys) -> None:
        await last_sweep(data)
        left = sorted(await data.unowned())
        Path(os.environ[LEFT]).write_text(json.dumps({"held": len(held), "left": left}))

    setattr(DriverData, "keys", keys)  # noqa: B010
    setattr(DataKeys, "last_sweep", sweep_and_look)  # noqa: B010
    sys.argv[1:] = words
    main()


class Experiment:
    """One run, in `directory`."""

    def __init__(self, directory: Path, backend: str, rng: random.Random) -> None:
        self.directory = directory
        self.run = directory / "runs" / NAME
        self.left_file = directory / "left.json"
        self._backend = backend
        self._rng = rng
        self._process: subprocess.Popen[str] | None = None
        self._err = directory / "stderr"

    def begin(self, *words: str, sets: tuple[str, ...] = ()) -> None:
        command = arguments(*words, sets=sets, verbose=False)
        command[1:3] = ["-m", "benchmarks.orphans", "--child"]
        root = Path(__file__).parents[1]
        path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
        own = {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(self.directory / "cache"), "PYTHONPATH": path}
        with self._err.open("a") as err:
            self._process = subprocess.Popen(
                command,
                cwd=self.directory,
                env=os.environ | own | {LEFT: str(self.left_file)},
                stdout=subprocess.DEVNULL,
                stderr=err,
                text=True,
                start_new_session=True,
            )

    def train(self) -> None:
        words = ("train", "--profile", "partial-rollout", "--name", NAME, "--ui", "plain")
        self.begin(*words, sets=(*SETS, f"data_plane.backend={self._backend}"))
        self.wait(lambda: bool(lines(self.run / "metrics.jsonl")))

    def resume(self) -> None:
        steps = self.num_steps
        self.begin("resume", NAME, "--ui", "plain")
        self.wait(lambda: self.num_steps > steps)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @property
    def num_steps(self) -> int:
        return len(lines(self.run / "metrics.jsonl"))

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in lines(self.run / "events.jsonl") if event["event"] == name]

    def wait(self, is_so: Callable[[], bool]) -> None:
        assert self._process is not None
        until_s = time.monotonic() + MOVES_WITHIN_S
        while not is_so():
            assert self._process.poll() is None, self._err.read_text()[-2000:]
            assert time.monotonic() < until_s, f"the run does not get on: {self._err.read_text()[-2000:]}"
            time.sleep(0.05)

    def kill_a_worker(self) -> None:
        """And wait until it is up again."""
        assert self._process is not None
        restarted = len(self.events("restarted"))
        time.sleep(self._rng.random() * 2)
        family = descendants(self._process.pid)
        workers = sorted(pid for pid in family if b"ray::RolloutHost" in command_line(pid))
        os.kill(self._rng.choice(workers), signal.SIGKILL)
        self.wait(lambda: len(self.events("restarted")) > restarted)

    def train_on(self) -> None:
        steps = self.num_steps
        self.wait(lambda: self.num_steps >= steps + STEPS_AFTER)

    def end(self, number: signal.Signals) -> int:
        """Returns the number of processes that are left."""
        assert self._process is not None
        family = descendants(self._process.pid)
        self._process.send_signal(number)
        self._process.wait(MOVES_WITHIN_S)
        return len(wait_until_gone(family, CLEAN_WITHIN_S))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", choices=("ray", "transferqueue"), default="ray")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--directory", type=Path, help="for the run and the model (default: temporary)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    # not without killing the run that it has started
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
    began_s = time.monotonic()
    with ExitStack() as ending:
        scratch = ending.enter_context(tempfile.TemporaryDirectory(prefix="orphans-"))
        directory = (options.directory or Path(scratch)).absolute()
        directory.mkdir(parents=True, exist_ok=True)
        experiment = Experiment(directory, options.backend, random.Random(options.seed))
        ending.callback(experiment.close)
        experiment.train()
        left_after_kill = 0
        for number in range(options.kills):
            if number == options.kills // 2:
                left_after_kill = experiment.end(signal.SIGKILL)
                experiment.resume()
            experiment.kill_a_worker()
            print(f"kill {number + 1}, step {experiment.num_steps}", file=sys.stderr, flush=True)
        experiment.train_on()
        left_at_end = experiment.end(signal.SIGINT)
        store = json.loads(experiment.left_file.read_text())
        last = lines(experiment.run / "metrics.jsonl")[-1]
        ledger = {
            name.removeprefix("ledger/"): value for name, value in last.items() if name.startswith("ledger/")
        }
        found = experiment.events("orphans")
        rows = {
            "backend": options.backend,
            "workers killed": options.kills,
            "driver killed": 1,
            "restarts of workers": len(experiment.events("restarted")),
            "train steps": experiment.num_steps,
            "groups trained": ledger["trained"],
            "orphans": sum(event["keys"] for event in found),
            "left by": ", ".join(sorted({event["left_by"] for event in found})) or "-",
            "keys held at the end": store["held"],
            "without owner": len(store["left"]),
            "left of processes": f"{left_after_kill} after the driver's kill, {left_at_end} at the end",
            "ledger": " ".join(f"{name} {value:g}" for name, value in ledger.items()),
            "seconds": round(time.monotonic() - began_s),
        }
        print("\n".join(f"{name:22}{value}" for name, value in rows.items()))
        adds_up = 2 * ledger["admitted_total"] == sum(ledger.values())
        return 1 if store["left"] or left_after_kill or left_at_end or not adds_up else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        as_child(sys.argv[2:])
    else:
        sys.exit(main())
