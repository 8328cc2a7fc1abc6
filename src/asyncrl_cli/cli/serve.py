"""`asyncrl serve`: a model behind OpenAI's API, whose weights another trainer updates."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from asyncrl_cli.cli.console import load_profile, say
from asyncrl_cli.cli.options import SetOption, number_option, text_option

EXAMPLES = """
  asyncrl serve --model runs/NAME/exported --port 8000
  asyncrl serve --model Qwen/Qwen3-0.6B --engine vllm --set rollout.max_response_tokens=1024
  curl -H "Authorization: Bearer $(cat serve.token)" http://127.0.0.1:8000/version"""


def serve(
    model: Annotated[
        str, text_option("--model", "DIR", "A model directory, a hub name, a .gguf file or builtin:tiny.")
    ],
    engine: Annotated[Literal["transformers", "vllm"], typer.Option("--engine", help="Inference engine.")] = (
        "transformers"
    ),
    host: Annotated[
        str,
        text_option(
            "--host", "HOST", "Address to listen on. Beyond loopback, whoever has the token may use it."
        ),
    ] = "127.0.0.1",
    port: Annotated[int, number_option("--port", "Port; 0: any that is free.", least=0, most=65535)] = 8000,
    token_file: Annotated[
        Path,
        text_option(
            "--token-file", "FILE", "File with the token (mode 0600). Made with a new one if missing."
        ),
    ] = Path("serve.token"),
    sets: SetOption = None,
) -> None:
    """Serve a model by OpenAI's API, and update its weights from another trainer: from disk, a bucket, or a
    process group of torch. Runs until Ctrl-C."""
    import asyncio

    from asyncrl_cli.base.safe_files import key_in
    from asyncrl_cli.job.host_process import set_up_process
    from asyncrl_cli.models.model_directory import model_here, resolve_model
    from asyncrl_cli.plan.cluster import local_cluster
    from asyncrl_cli.plan.compiler import device_of
    from asyncrl_cli.plan.job_plan import for_device
    from asyncrl_cli.profile.schema import ProcessPlace
    from asyncrl_cli.tasks.task import load_task

    # last, because they hold whatever is set: requests are responses, not groups
    own = ["rollout.n=1", "algorithm.adv_estimator=gae", f"model.path={model}", f"rollout.engine={engine}"]
    given = [*(sets or []), *own]
    here = local_cluster()
    loaded = load_profile("base", given)
    device = device_of(loaded.profile, here)
    profile = for_device(loaded, device).profile
    say(f"loading {model} into the engine {profile.rollout.engine} on {device}")
    set_up_process(threads=here.cpus, log_path=None)  # before anything imports torch
    from asyncrl_cli.job.serving import bound, serve_until_stopped

    key_in(token_file)
    with bound(host, port) as listening:
        model_dir = model_here(profile) or resolve_model(profile, load_task(profile))
        place = ProcessPlace(model_dir=str(model_dir.absolute()), device=device, threads=here.cpus)
        asyncio.run(serve_until_stopped(profile, place, listening, token_file, say))
