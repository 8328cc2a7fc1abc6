"""The look into /proc that other tests take at their runs (`assert_shut`, `listening`)."""

import os
import socket
from pathlib import Path

import pytest

from tests.run.listening import listening

pytestmark = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs /proc")


def test_the_kernels_table_is_read_rightly():
    with socket.create_server(("127.0.0.1", 0)) as here, socket.create_server(("", 0)) as everywhere:
        found = {(host, port) for _, host, port in listening({os.getpid()})}
        assert ("127.0.0.1", here.getsockname()[1]) in found
        assert ("0.0.0.0", everywhere.getsockname()[1]) in found
