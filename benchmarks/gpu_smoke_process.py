"""Runs a check of gpu_smoke.py in a process of its own."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

END_S = 10.0
# CUDA does not work in a fork of a process that has looked for it
SPAWN = multiprocessing.get_context("spawn")
Outcome = dict[str, Any]


def outcome_of(name: str, module: str, device: str, directory: Path, limit_s: float) -> Outcome:
    """Runs a check in a process of its own, so that whatever it does leaves the others alone. At the limit it
    is ended, with all processes that it has started."""
    ours, theirs = SPAWN.Pipe(duplex=False)
    process = SPAWN.Process(target=_run, args=(name, module, device, directory, theirs))
    began_s = time.monotonic()
    process.start()
    theirs.close()
    outcome: Outcome = {"check": name, "end": "failed", "seconds": limit_s, "card": device, "figures": {}}
    try:
        found: Outcome | None = ours.recv() if ours.poll(limit_s) else None
        outcome |= found or {"detail": f"it had not ended after {limit_s:g} s"}
    except EOFError:
        process.join(END_S)
        outcome |= {
            "detail": f"its process ended with {process.exitcode}",
            "seconds": round(time.monotonic() - began_s, 1),
        }
    else:
        process.join(END_S)
    finally:
        process.kill()
        with suppress(ProcessLookupError):  # no process of its session is left
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
    return outcome


def _run(name: str, module: str, device: str, directory: Path, parent: Connection) -> None:
    """Sends the parent the outcome, whatever the check ends with, with what it had measured by then."""
    os.setsid()  # its processes form a group, which the parent ends
    os.dup2(2, 1)  # the parent's stdout is for the outcomes alone; vLLM logs to stdout
    from gpu_smoke_kit import Machine, Skipped, Wrong

    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    logging.getLogger("asyncrl_cli").setLevel(logging.INFO)  # what was chosen, and why
    began_s, figures = time.perf_counter(), dict[str, Any]()
    end, detail, card = "passed", "", device
    try:
        card = _card(device)
        getattr(import_module(module), f"check_{name}")(Machine(device, directory), figures)
    except Skipped as why:
        end, detail = "skipped", str(why)
    except Wrong as wrong:
        end, detail = "failed", str(wrong)
    except BaseException as error:
        traceback.print_exc()
        end, detail = "failed", f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
    seconds = time.perf_counter() - began_s
    rounded = {
        key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in figures.items()
    }
    parent.send(
        {
            "check": name,
            "end": end,
            "seconds": round(seconds, 1),
            "card": card,
            "detail": detail,
            "figures": rounded,
        }
    )
    parent.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of an engine that hangs do not keep the process


def _card(device: str) -> str:
    """The card's name and the libraries' versions. Raises Skipped if there is none."""
    import torch
    import transformers
    from gpu_smoke_kit import Skipped

    if device == "cuda" and not torch.cuda.is_available():
        raise Skipped(f"torch {torch.__version__} sees no CUDA GPU; --device cpu runs small models")
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU ({os.cpu_count()} cores)"
    return f"{name}, {torch.__version__}, {transformers.__version__}"
