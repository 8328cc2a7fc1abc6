"""LoRA's adapters alone, applied by real vLLM's own LoRA, against plain forward passes of transformers with
the merged weights; and loads that do not do what they should."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl_cli.base.errors import ConfigError
from asyncrl_cli.engines.port import Completion
from asyncrl_cli.engines.vllm.engine_processes import answer
from asyncrl_cli.engines.vllm.vllm_engine import VllmEngine
from asyncrl_cli.profile.arithmetic import MAX_LOGPROB_DIFF
from asyncrl_cli.profile.schema import Interrupt, LoraSection
from asyncrl_cli.weights.receivers import SharedWeights, packed
from asyncrl_cli.weights.versions import judge, make_probes, mean_abs_diff, median_abs_diff
from tests.engines import tiny
from tests.engines.made import made_for, prompts, sampling
from tests.engines.needs import runs_vllm
from tests.engines.vllm.vllm_world import FUNCTIONS_MAY_BE_SENT, MAX_PROMPT_TOKENS, World, world

pytestmark = runs_vllm
LORA = LoraSection(rank=3, alpha=6.0, sync="adapter")
"""vLLM's buffers hold rank 8."""
LAYERS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
LAYERS += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
PROBES = [list(probe) for probe in make_probes(4, 64, 0)]
Tensors = dict[str, torch.Tensor]


def drawn(weights: Tensors, layers: list[str], seed: int) -> Tensors:
    """Adapters of these layers."""
    generator, adapters = torch.Generator().manual_seed(seed), Tensors()
    for layer in layers:
        num_out, num_in = weights[f"{layer}.weight"].shape
        adapters[f"{layer}.lora_A.weight"] = torch.randn(LORA.rank, num_in, generator=generator) * 0.2
        adapters[f"{layer}.lora_B.weight"] = torch.randn(num_out, LORA.rank, generator=generator) * 0.05
    return adapters


def merged(weights: Tensors, adapters: Tensors) -> Tensors:
    """In double precision."""
    found = dict(weights)
    for name in adapters:
        layer, is_a, _ = name.partition(".lora_A.weight")
        if is_a:
            a, b = adapters[name].double(), adapters[f"{layer}.lora_B.weight"].double()
            whole = weights[f"{layer}.weight"].double() + LORA.alpha / LORA.rank * b @ a
            found[f"{layer}.weight"] = whole.float()
    return found


class AdapterWorld(World):
    """`weights` are merged ones, for plain forward passes; what is loaded are `adapters`."""

    adapters: dict[int, Tensors]

    def newer(self) -> int:
        version = max(self.weights) + 1
        layers = [f"model.layers.{i}.{name}" for i in range(3) for name in LAYERS]
        self.merge(version, drawn(self.weights[0], layers, version))
        return version

    def merge(self, version: int, adapters: Tensors) -> None:
        self.adapters = {**getattr(self, "adapters", {}), version: adapters}
        self.weights[version] = merged(self.weights[0], adapters)

    async def load(self, version: int, interrupt: Interrupt) -> Any:
        return await self.load_these(self.adapters[version], version, interrupt)

    def plain_probes(self, version: int) -> list[list[float]]:
        return [tiny.plain_logprobs(self.model, self.weights[version], probe) for probe in PROBES]

    async def probed(self) -> list[list[float]]:
        return (await self.engine.score(PROBES, 1.0)).logprobs


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdapterWorld]:
    model = tiny.make_model(seed=2)
    model.lm_head.weight[tiny.EOS] = 0.0  # responses hardly end early
    directory = tiny.save(model, tmp_path_factory.mktemp("base"))
    extension = {"worker_extension_cls": "tests.engines.vllm.paced_adapters.PacedAdapters"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(*FUNCTIONS_MAY_BE_SENT)
        with world(model, directory, AdapterWorld, lora=LORA, engine_args=extension) as running:
            assert isinstance(running, AdapterWorld)
            yield running


def check_spans(there: World, prompt: list[int], completion: Completion, versions: set[int]) -> None:
    """The tokens of these versions have the logprobs of their merged weights."""
    assert completion.versions == sorted(completion.versions)
    plain = {version: there.plain(version, prompt, completion, 0.8) for version in versions}
    checked = [i for i, version in enumerate(completion.versions) if version in versions]
    expected = [plain[completion.versions[i]][i] for i in checked]
    assert [completion.logprobs[i] for i in checked] == pytest.approx(expected, abs=1e-4)


async def test_until_a_version_is_loaded_the_adapters_have_no_effect(there: AdapterWorld) -> None:
    assert there.engine.version == 0
    for prompt, completion in zip(
        prompts(6), await there.all_of(prompts(6), sampling(temperature=0.8)), strict=True
    ):
        check_spans(there, prompt, completion, {0})
        assert set(completion.versions) == {0}


@pytest.mark.parametrize("interrupt", ["recompute-kv", "keep-kv", "drain"])
async def test_running_responses_go_on_with_new_adapters_as_with_new_weights(
    there: AdapterWorld, interrupt: Interrupt
) -> None:
    """24 requests on 8 slots, and two loads among them."""
    versions, requests = [there.engine.version], prompts(24)
    generating = asyncio.create_task(there.all_of(requests, sampling(100, temperature=0.8)))
    for _ in range(2):
        await there.sampled(100)
        versions.append(there.newer())
        await there.load(versions[-1], interrupt)
        assert mean_abs_diff(await there.probed(), there.plain_probes(versions[-1])) < 1e-4
    completions = await generating
    assert {version for one in completions for version in one.versions} == set(versions)
    most = max(len(set(completion.versions)) for completion in completions)
    assert most == 1 if interrupt == "drain" else most >= 2
    for prompt, completion in zip(requests, completions, strict=True):
        # with the old cache a later span is of a mixture
        exact = {completion.versions[0]} if interrupt == "keep-kv" else set(versions)
        check_spans(there, prompt, completion, exact)
    if interrupt == "keep-kv":
        prompt, mixed = next(
            (p, c) for p, c in zip(requests, completions, strict=True) if len(set(c.versions)) > 1
        )
        border = next(i for i, version in enumerate(mixed.versions) if version != mixed.versions[0])
        for version in (mixed.versions[0], mixed.versions[border]):
            assert abs(mixed.logprobs[border] - there.plain(version, prompt, mixed, 0.8)[border]) > 1e-4


async def test_a_new_request_never_meets_keys_and_values_of_older_adapters(there: AdapterWorld) -> None:
    long = [3 + i % 47 for i in range(MAX_PROMPT_TOKENS)]

    async def cached_tokens(version: int) -> float:
        before = there.engine.counters().sums["cached_prompt_tokens"]
        check_spans(there, long, await there.generate(long, sampling(temperature=0.8)), {version})
        return there.engine.counters().sums["cached_prompt_tokens"] - before

    await cached_tokens(there.engine.version)
    for interrupt in ("keep-kv", "recompute-kv"):
        assert await cached_tokens(there.engine.version) > 0
        version = there.newer()
        await there.load(version, interrupt)
        assert await cached_tokens(version) == 0


def plant(worker: Any, mistake: str) -> None:
    """For `in_engine`: loads make this mistake from here on."""
    from vllm.lora.model_manager import LoRAModelManager

    from asyncrl_cli.engines.vllm import bucket_engine

    kept = vars(bucket_engine).setdefault("kept", {})
    mapped = kept.setdefault("mapped_tensors", bucket_engine.mapped_tensors)
    activate = kept.setdefault("activate", LoRAModelManager.activate_adapter)

    def half(*where: Any) -> Any:
        return [(name, tensor) for name, tensor in mapped(*where) if ".self_attn." in name]

    def noted(*where: Any) -> Any:
        found = mapped(*where)
        before, kept["last"] = kept.get("last"), [(name, tensor.clone()) for name, tensor in found]
        return before if mistake == "of the version before" else found

    def only_registered(manager: Any, adapter_id: int) -> bool:
        manager._active_adapters[adapter_id] = None
        manager.lora_index_to_id[0] = adapter_id
        return True

    is_left = mistake == "left as they were"
    bucket_engine.mapped_tensors = half if mistake == "of half of the layers" else noted
    LoRAModelManager.activate_adapter = only_registered if is_left else activate  # type: ignore[method-assign]


@contextlib.asynccontextmanager
async def planted(there: World, mistake: str) -> AsyncIterator[None]:
    await there.in_engine(plant, mistake)
    try:
        yield
    finally:
        await there.in_engine(plant, "none")


@pytest.mark.parametrize(
    "mistake", ["none", "left as they were", "of the version before", "of half of the layers"]
)
async def test_the_probes_tell_of_adapters_that_are_not_applied(there: AdapterWorld, mistake: str) -> None:
    """Adapters of a small step: that a load did nothing is no gross error."""
    first, second = there.newer(), there.newer()
    before, step = there.adapters[first], there.adapters[second]
    there.merge(second, {name: tensor + 1e-4 * step[name] for name, tensor in before.items()})
    old, new = there.plain_probes(first), there.plain_probes(second)
    async with planted(there, "none"):
        await there.load(first, "keep-kv")
    async with planted(there, mistake):
        await there.load(second, "keep-kv")
        probed = await there.probed()
    judged, off = judge(probed, new, old), median_abs_diff(probed, new)
    print(f"{mistake}: {judged}; new against old {mean_abs_diff(new, old):.2g}")
    assert mean_abs_diff(new, old) < MAX_LOGPROB_DIFF["float32"]
    if mistake == "of half of the layers":
        assert off > 10 * MAX_LOGPROB_DIFF["float32"], "a gross error, at which a run warns"
    else:
        assert judged.verdict == ("loaded" if mistake == "none" else "not loaded")
        assert judged.share == pytest.approx(float(mistake == "none"), abs=0.05)


async def test_what_does_not_fit_is_refused_and_the_last_adapters_stay(there: AdapterWorld) -> None:
    before, prompt = there.newer(), prompts(1)[0]
    await there.load(before, "keep-kv")
    wrong = dict(there.adapters[before])
    name = next(iter(wrong))
    for weights, why in [
        (there.model.state_dict(), r"missing model\.layers\.0\..*lora_A.*unknown lm_head"),
        ({**wrong, name: wrong[name][:2].clone()}, "wrong shape"),
        ({n: t for n, t in wrong.items() if n != name}, "missing"),
    ]:
        with pytest.raises(ValueError, match=why):
            await there.load_these(weights, before + 1, "keep-kv")
    # layers that vLLM does not have: it would leave them out
    llm, foreign = (
        there.engine.llm,
        {f"model.layers.0.mlp.gate.lora_{side}.weight": torch.ones(3, 3) for side in "AB"},
    )
    assert llm is not None
    given = SharedWeights([packed(foreign)])
    with pytest.raises(Exception, match=r"vLLM's LoRA does not reach model\.layers\.0\.mlp\.gate"):
        await answer(llm, llm.collective_rpc("load_adapters", args=(given.describe(foreign.keys()), 3, 6.0)))
    assert there.engine.version == before
    check_spans(there, prompt, await there.generate(prompt, sampling(temperature=0.8)), {before})


def test_a_layer_that_vllm_would_leave_out_is_refused_at_the_start_by_its_name(tmp_path: Path) -> None:
    """Here vLLM is told to adapt no layer but one."""
    tiny.save(tiny.make_model(), tmp_path)
    lengths = {"slots": 4, "max_prompt_tokens": 64, "max_response_tokens": 64}
    made = made_for(tmp_path, lora=LORA, engine_args={"lora_target_modules": ["q_proj"]}, **lengths)

    async def refused() -> None:
        engine = VllmEngine(*made)
        try:
            with pytest.raises(ConfigError, match=r"does not reach.*down_proj") as caught:
                await engine.start()
            assert "enable_lora=false" in caught.value.hint
        finally:
            await engine.close()

    asyncio.run(refused())
