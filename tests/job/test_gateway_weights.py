"""Another trainer drives a rollout worker by its gateway, with curl: it writes weights to disk, has them
loaded, and samples."""

from __future__ import annotations

import asyncio
import json
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from safetensors.torch import save_file

from asyncrl_cli.engines.port import Sampling
from asyncrl_cli.engines.transformers.transformers_engine import TransformersEngine
from asyncrl_cli.envs.episode import Limits
from asyncrl_cli.envs.gateway.admin_routes import admin_routes
from asyncrl_cli.envs.gateway.server import Gateway
from asyncrl_cli.envs.slots import Slots, TrajectorySlot
from asyncrl_cli.job.rollout_weights import Loader
from asyncrl_cli.measure.meters import RolloutMeter
from asyncrl_cli.profile.schema import WeightsSection
from asyncrl_cli.weights.senders import write_manifest
from tests.engines import tiny
from tests.engines.conftest import model, model_dir
from tests.engines.made import made_for
from tests.envs.gateways import CHAT
from tests.waiting import until

__all__ = ["model", "model_dir"]
PROMPT = [5, 6, 7]


class WatchedSlots(Slots):
    is_draining = False

    def drained(self) -> AbstractAsyncContextManager[None]:
        self.is_draining = True
        return super().drained()


async def curl(gateway: Gateway, path: str, body: Any = None, key: str | None = None) -> tuple[int, Any]:
    data = [] if body is None else ["-d", json.dumps(body)]
    header = ["-H", f"Authorization: Bearer {gateway.admin_key if key is None else key}"]
    command = ["curl", "-s", "-m", "20", "-w", "\n%{http_code}", *header, *data, gateway.url + path]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    answer, _, status = output.decode().rpartition("\n")
    return int(status), json.loads(answer)


@pytest.mark.slow
def test_a_worker_loads_what_another_trainer_has_written_and_samples_with_it(tmp_path, model, model_dir):
    weights = tiny.weights_after(model, 1)
    version = tmp_path / "theirs"
    version.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, version / "model.safetensors")
    write_manifest(version, 4)

    async def main() -> None:
        engine = TransformersEngine(
            *made_for(model_dir, slots=4, max_prompt_tokens=16, max_response_tokens=24)
        )
        places = WatchedSlots(4, hold=True)
        meter = RolloutMeter("rollout-0", 4, asyncio.get_running_loop().time, lambda: None)
        loader = Loader(engine, WeightsSection(), meter, 0, places)
        sampling = Sampling(temperature=1.0, max_response_tokens=24)
        gateway = Gateway(engine, CHAT, sampling, Limits(max_prompt_tokens=16, max_context_tokens=40))
        try:
            await engine.start()
            await gateway.start(admin_routes(gateway, loader))
            await drive(gateway)
            await drained(gateway, places)
        finally:
            await gateway.close()
            await engine.close()

    async def drive(gateway: Gateway) -> None:
        assert await curl(gateway, "/weights") == (
            200,
            {"version": 0, "fingerprint": None, "last_load": None},
        )
        assert [
            (await curl(gateway, path, {}, "wrong"))[0] for path in ("/weights/load", "/pause", "/resume")
        ] == [401] * 3
        assert await curl(gateway, "/pause", {}) == (200, {"paused": True})
        waiting = asyncio.create_task(
            curl(gateway, "/v1/completions", {"prompt": PROMPT, "return_token_ids": True})
        )
        status, loaded = await curl(gateway, "/weights/load", {"path": str(version)})
        assert (status, loaded["version"], loaded["last_load"]["version"]) == (200, 4, 4)
        assert not waiting.done()
        assert (await curl(gateway, "/resume", {}))[0] == 200
        _, answer = await waiting
        choice = answer["choices"][0]
        assert set(choice["weight_versions"]) == {4}
        expected = tiny.plain_logprobs(model, weights, [*PROMPT, *choice["token_ids"]])[len(PROMPT) - 1 :]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-4)
        await refused(gateway, loaded["fingerprint"])

    async def drained(gateway: Gateway, places: WatchedSlots) -> None:
        """A drain waits for an episode whose agent is at work, though no request runs."""
        place = TrajectorySlot(places)
        await place.take()
        write_manifest(version, 6)
        load = asyncio.create_task(
            curl(gateway, "/weights/load", {"path": str(version), "interrupt": "drain"})
        )
        await until(lambda: places.is_draining)
        await asyncio.sleep(0.1)
        assert not load.done()
        place.leave()
        assert (await load)[1]["version"] == 6

    async def refused(gateway: Gateway, fingerprint: str) -> None:
        """What cannot be loaded leaves the loaded version as it is."""
        status, again = await curl(gateway, "/weights/load", {"path": str(version)})
        assert (status, "not newer" in again["error"]["message"]) == (400, True)
        write_manifest(version, 5)
        with (version / "model.safetensors").open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"x")
        status, damaged = await curl(gateway, "/weights/load", {"path": str(version)})
        assert (status, "fingerprint" in damaged["error"]["message"]) == (400, True)
        assert (await curl(gateway, "/weights/load", {"path": str(tmp_path)}))[0] == 400
        _, now = await curl(gateway, "/weights")
        assert (now["version"], now["fingerprint"]) == (4, fingerprint)

    asyncio.run(asyncio.wait_for(main(), 60))
