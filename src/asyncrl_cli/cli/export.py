"""`asyncrl export`: writes a run's weights to a directory that transformers and vLLM can load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from asyncrl_cli.cli.console import print_json, print_text, say, warn
from asyncrl_cli.cli.options import RUNS_DIR, JsonOption, RunsDirOption, number_option, run_argument

EXAMPLES = """
  asyncrl export first                                    the newest whole checkpoint of run "first"
  asyncrl export first --version 12 --out my-model        the weights of version 12, as used for rollouts
  vllm serve $(asyncrl export first)                      stdout is only the directory's path"""
GB = 10**9


def export(
    source: Annotated[
        str,
        run_argument(
            "RUN|CHECKPOINT", "A run's name or directory, RUN/step-000040, or a checkpoint's directory."
        ),
    ],
    version: Annotated[
        int | None,
        number_option("--version", "A published version: one that was kept, or a checkpoint's.", least=0),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", help="Directory to write, new or empty. Default: in the run's directory."
        ),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        typer.Option("--dtype", help="Data type of the weights. Default: as the run publishes them."),
    ] = None,
    max_shard_size_gb: Annotated[
        float,
        number_option("--max-shard-size-gb", "Largest weight file, in 10^9 bytes.", least=1e-6, metavar="GB"),
    ] = 5.0,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model", metavar="DIR", help="Directory with config.json and tokenizer, if the run's is gone."
        ),
    ] = None,
    adapter: Annotated[
        bool,
        typer.Option("--adapter", help="LoRA: write only the adapters, for peft, instead of merging them."),
    ] = False,
    runs_dir: RunsDirOption = RUNS_DIR,
    as_json: JsonOption = False,
) -> None:
    """Write a run's weights as a Hugging Face model directory."""
    from asyncrl_cli.base.errors import counted
    from asyncrl_cli.export.exported import export as export_weights
    from asyncrl_cli.observe.startup import ProgressLine

    with ProgressLine("auto") as progress:
        progress("looking for the weights")
        exported = export_weights(
            source,
            runs_dir=runs_dir,
            version=version,
            out=out,
            dtype=dtype,
            model=model,
            adapter=adapter,
            max_file_bytes=int(max_shard_size_gb * GB),
            progress=progress,
        )
    warn(
        *(f"{wrong}; using an older checkpoint instead" for wrong in exported.source.passed_over),
        *exported.source.notes,
    )
    files = f"{_size(exported.num_bytes)} in {counted(len(exported.files), 'file')}"
    say(f"exported {exported.source}: {exported.parameters:,} parameters, {exported.dtype}, {files}")
    if as_json:
        print_json(exported.to_json())
    else:
        print_text(str(exported.path))


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GB:.2f} GB" if num_bytes >= GB else f"{num_bytes / 10**6:.1f} MB"
