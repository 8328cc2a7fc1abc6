"""A process of ours, set up: what OpenMP makes of it."""

import os
import subprocess
import sys

import pytest

COMPUTE = """
from asyncrl_cli.job.host_process import set_up_process
set_up_process(threads=2, log_path=None)
import torch
"""


@pytest.mark.slow
def test_threads_that_wait_keep_their_core_if_the_user_says_so():
    """As OpenMP itself tells it when it is loaded. What it does otherwise is in test_real_actors.py."""
    # vLLM's tests leave an OpenMP in LD_PRELOAD, which would read its variables before our set-up.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("OMP_") and name != "LD_PRELOAD"
    }
    environment |= {"OMP_DISPLAY_ENV": "true", "OMP_WAIT_POLICY": "active"}
    done = subprocess.run(
        [sys.executable, "-c", COMPUTE],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    settings = done.stderr.replace("'", "").replace("[host] ", "")
    assert "OMP_WAIT_POLICY = ACTIVE" in settings
    assert "OMP_NUM_THREADS = 2" in settings
