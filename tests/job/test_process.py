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
@pytest.mark.parametrize(
    ("of_the_user", "policy"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "active"}, "ACTIVE")]
)
def test_threads_that_wait_leave_their_core_to_others_unless_the_user_says_otherwise(of_the_user, policy):
    """As OpenMP itself tells it when it is loaded."""
    # vLLM's tests leave an OpenMP in LD_PRELOAD, which would read its variables before our set-up.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("OMP_") and name != "LD_PRELOAD"
    }
    environment |= {"OMP_DISPLAY_ENV": "true", **of_the_user}
    done = subprocess.run(
        [sys.executable, "-c", COMPUTE],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    settings = done.stderr.replace("'", "").replace("[host] ", "")
    assert f"OMP_WAIT_POLICY = {policy}" in settings
    assert "OMP_NUM_THREADS = 2" in settings
