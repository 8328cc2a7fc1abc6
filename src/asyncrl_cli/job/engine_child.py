"""The program of a `ProcessEngine`'s child: `python -m asyncrl_cli.job.engine_child PARENT_PID`, with the embedded engine in it."""

from __future__ import annotations

import asyncio
import sys
from functools import partial

from asyncrl_cli.job.process import set_up_process
from asyncrl_cli.tasks.child import become_child
from asyncrl_cli.tasks.frames import read_frame


def main() -> None:
    requests, results = become_child(int(sys.argv[1]))
    settings = read_frame(requests)
    if settings is None:
        return
    set_up_process(threads=settings["threads"], log_path=None)
    from asyncrl_cli.rollout.engine_server import EngineServer
    from asyncrl_cli.rollout.transformers_engine import TransformersEngine

    asyncio.run(EngineServer(partial(TransformersEngine, **settings), results).serve(requests))


if __name__ == "__main__":
    main()
