"""`asyncrl serve` around its engine: the key, the sampling, the ends, one update at a time."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch
from pydantic import ValidationError
from transformers import LlamaConfig, LlamaForCausalLM

from asyncrl_cli.base.daemon_threads import in_daemon
from asyncrl_cli.base.errors import AsyncrlError, RefusedError
from asyncrl_cli.envs.gateway.admin_routes import LoadPost, admin_routes
from asyncrl_cli.envs.gateway.async_rl_routes import PathPost, UpdatePost
from asyncrl_cli.job import serving
from asyncrl_cli.profile.schema import LoraSection, ProcessPlace, Profile, RolloutSection
from asyncrl_cli.weights.buckets import Spec, Unpacked
from asyncrl_cli.weights.group import WeightGroup
from tests.envs.gateways import CHAT, ScriptedEngine
from tests.packed import pack
from tests.waiting import until


class Starting(ScriptedEngine):
    """Its start waits for `held`."""

    num_closed = 0
    started = False

    async def start(self) -> None:
        self.started = True
        await self.held.wait()

    async def close(self) -> None:
        self.num_closed += 1


async def serve(tmp_path, monkeypatch, starting: Starting, token_file, said: list[str], lora=None, **rollout):
    monkeypatch.setattr(serving, "make_engine", lambda *given: starting)
    monkeypatch.setattr(serving, "load_chat", lambda *given, **more: CHAT)
    monkeypatch.setattr(serving, "facts_of", lambda *given: {})  # reads a model's config.json
    profile = Profile(rollout=RolloutSection(**rollout), lora=lora or LoraSection())
    place = ProcessPlace(model_dir=str(tmp_path), device="cpu", threads=1)
    with serving.bound("127.0.0.1", 0) as listening:
        await serving.serve_until_stopped(profile, place, listening, token_file, said.append)


@pytest.mark.parametrize("number", serving.SIGNALS)
def test_a_signal_during_the_start_ends_it_afterwards_and_a_second_of_either_kind_at_once(
    tmp_path, monkeypatch, number
):
    engine, said = Starting(says=str), list[str]()

    async def main() -> None:
        serves = serve(tmp_path, monkeypatch, engine, tmp_path / "token", said)
        served = asyncio.create_task(serves)
        await until(lambda: engine.started)
        assert (tmp_path / "token").read_text().strip()
        os.kill(os.getpid(), number)
        await until(lambda: bool(said))
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        engine.held.set()
        await served

    asyncio.run(asyncio.wait_for(main(), 20))
    assert said == ["ending; a second signal ends at once"]
    assert engine.num_closed == 1


def test_garbage_is_collected_while_it_serves_but_not_while_it_starts(tmp_path, monkeypatch):
    engine, said = Starting(says=str), list[str]()

    async def main() -> None:
        served = asyncio.create_task(serve(tmp_path, monkeypatch, engine, tmp_path / "token", said))
        await until(lambda: engine.started)
        assert not gc.isenabled()
        engine.held.set()
        await until(lambda: bool(said))
        assert (said[0].startswith("serving"), gc.isenabled()) == (True, True)
        os.kill(os.getpid(), signal.SIGTERM)
        await served

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_token_file_that_cannot_be_written_is_refused_before_the_model_is_loaded(tmp_path, monkeypatch):
    engine = Starting(says=str)
    with pytest.raises(RefusedError, match="token cannot be written: No such file"):
        asyncio.run(serve(tmp_path, monkeypatch, engine, tmp_path / "missing" / "token", []))
    assert not engine.started


def test_a_served_request_asks_for_no_kept_tokens(tmp_path, monkeypatch):
    given = []
    real = serving.Gateway

    def noted(engine, chat, sampling, *more, **named):
        given.append(sampling)
        return real(engine, chat, sampling, *more, **named)

    monkeypatch.setattr(serving, "Gateway", noted)
    file = tmp_path / "missing" / "token"
    with pytest.raises(RefusedError):
        asyncio.run(serve(tmp_path, monkeypatch, Starting(says=str), file, [], top_k=8))
    assert (given[0].top_k, given[0].returns_kept) == (8, False)


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_adapters_are_merged_into_the_served_model_unless_the_engine_applies_them(
    tmp_path, monkeypatch, engine
):
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        )
    )
    model.save_pretrained(tmp_path)
    made, real = [], serving.Loader
    monkeypatch.setattr(serving, "Loader", lambda *given: made.append(given[-1]) or real(*given))
    lora = LoraSection(rank=2, alpha=6.0, target_modules=("v_proj",), sync="adapter")
    file = tmp_path / "missing" / "token"  # ends it before the model is loaded
    with pytest.raises(RefusedError):
        asyncio.run(serve(tmp_path, monkeypatch, Starting(says=str), file, [], lora, engine=engine))
    name = "model.layers.0.self_attn.v_proj"
    sent = {f"{name}.lora_A.weight": torch.rand(2, 16), f"{name}.lora_B.weight": torch.rand(16, 2)}
    arrived = Unpacked(made[0](pack(sent, 10_000)))
    if engine == "vllm":
        assert arrived.keys() == sent.keys()
        return
    a, b = sent.values()
    torch.testing.assert_close(arrived[f"{name}.weight"], model.state_dict()[f"{name}.weight"] + 3 * b @ a)
    assert arrived.keys() == model.state_dict().keys()


@pytest.mark.parametrize(
    ("post", "body"), [(LoadPost, {"path": "x"}), (PathPost, {"model_path": "x"}), (UpdatePost, {})]
)
def test_no_update_takes_an_interrupt_that_only_a_run_can_honour(post, body):
    assert post(**body, interrupt="drain").interrupt == "drain"
    with pytest.raises(ValidationError):
        post(**body, interrupt="restart")


def test_the_end_does_not_wait_for_a_thread_that_receives():
    async def main() -> str:
        in_daemon(lambda: time.sleep(30), "sleep")
        return await asyncio.wrap_future(in_daemon(lambda: "received", "receive"))

    began_s = time.monotonic()
    assert asyncio.run(main()) == "received"
    assert time.monotonic() - began_s < 20


def test_a_load_waits_for_an_update_that_runs(tmp_path):
    async def main() -> None:
        lock, asked = asyncio.Lock(), SimpleNamespace(check_admin=lambda request: None)
        (load,) = [one.handler for one in admin_routes(asked, None, lock) if one.path == "/weights/load"]
        body = b'{"path": "' + str(tmp_path).encode() + b'"}'

        async def read() -> bytes:
            return body

        async with lock:
            loading = asyncio.create_task(load(SimpleNamespace(read=read)))
            await asyncio.wait({loading}, timeout=0.2)
            assert not loading.done()
        with pytest.raises(Exception, match=r"manifest\.json"):
            await loading

    asyncio.run(main())


def test_a_tensor_without_room_is_one_error():
    group = WeightGroup(SimpleNamespace(), "cpu")
    with pytest.raises(AsyncrlError, match="big did not arrive from rank 0: "):
        group.receive([Spec(name="big", dtype="float32", shape=(2**45,))])
