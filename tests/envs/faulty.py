"""An environment whose tools do what tools should not, in TRL's convention: imported by
test_tool_environment.py's processes."""

import asyncio
import ctypes
import os
import subprocess
import sys
import threading
import time

DAEMON = """
import os
if pid := os.fork():
    print(pid, flush=True)
    os._exit(0)
os.setsid()
os.close(1)
os.execvp("sleep", ["sleep", "600"])
"""


class Faulty:
    def reset(self, answer: str | None = None, how: str = "", **columns: object) -> str | None:
        """Begin. `how`: what `reset` does wrong."""
        if how == "hang":
            time.sleep(600)
        if how == "raise":
            raise RuntimeError("no such shop")
        if how == "number":
            return 3  # type: ignore[return-value]
        self.said: list[str] = []
        self.worth: object = {"reward hangs": "hang", "reward is None": None}.get(how, 1.0)
        return f" (answer {answer})" if answer else None

    def echo(self, text: str) -> str:
        """Say a text.

        Args:
            text: What to say.
        """
        self.said.append(text)
        return f"{len(self.said)}: {text}"

    async def wait(self, seconds: float) -> str:
        """Wait.

        Args:
            seconds: How long.
        """
        await asyncio.sleep(seconds)
        return "waited"

    def misbehave(self, how: str) -> object:
        """Misbehave.

        Args:
            how: In which way.
        """
        return getattr(self, f"_{how}")()

    def get_reward(self) -> float:
        """What it was worth."""
        if self.worth == "hang":
            time.sleep(600)
        return self.worth  # type: ignore[return-value]

    def _hang(self):
        time.sleep(600)

    def _exit(self):
        os._exit(3)

    def _crash(self):
        ctypes.string_at(0)

    def _sys_exit(self):
        sys.exit(3)

    def _raise(self):
        raise ValueError("out of stock")

    def _fork(self):
        """Leaves a process behind that holds every open file."""
        if (pid := os.fork()) == 0:
            time.sleep(600)
        return pid

    def _fork_and_exit(self):
        self._fork()
        os._exit(4)

    def _thread(self):
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
        return "started"

    def _daemon(self):
        """Leaves a process behind in a session of its own, whose parent has ended."""
        return subprocess.check_output([sys.executable, "-c", DAEMON]).decode()

    def _megabytes(self):
        print("x" * 3_000_000)
        os.write(1, b"y" * 1_000_000)
        return "printed"

    def _ten_megabytes(self):
        return "x" * 10_000_000

    def _pid(self):
        return os.getpid()


def worth_of_answers(completions, environments, log_metric, **columns):
    """A reward in TRL's signature."""
    log_metric("said", len(environments[0].said))
    return [float(len(completion)) for completion in completions]
