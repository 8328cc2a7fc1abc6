"""The sink for TensorBoard: every number of a line of metrics.jsonl under the same name, in `run_dir/tensorboard`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl_cli.observe.background import Background
from asyncrl_cli.observe.format import is_number


class TensorBoard(Background):
    """A resumed run goes on in the same directory; TensorBoard itself leaves out the steps that were trained again."""

    service, otherwise = "TensorBoard", "pip install 'asyncrl-cli[tensorboard]', or --set logging.tensorboard=false"

    def __init__(self, run_dir: Path) -> None:
        self._directory = str(run_dir / "tensorboard")
        super().__init__()

    def open(self) -> None:
        from tensorboard.summary import Writer

        self._writer = Writer(self._directory)

    def write(self, line: Mapping[str, Any]) -> None:
        for key, value in line.items():
            if is_number(value) and key != "step":
                self._writer.add_scalar(key, value, line["step"])
        self._writer.flush()

    def finish(self, status: Mapping[str, Any]) -> None:
        self._writer.close()
