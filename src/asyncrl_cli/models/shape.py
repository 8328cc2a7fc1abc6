"""A model's sizes, read from its config.json and the headers of its weights, without torch and without the
network.

Parameters of a decoder of the llama family (h hidden, i intermediate, a = heads * head_dim, j = key-value
heads * head_dim, V vocabulary):

    layer   q h*a, k h*j, v h*j, o a*h, gate h*i, up h*i, down i*h, two norms of h
            (some families add biases or q/k norms)
    root    embedding V*h, last norm h, and a head V*h unless it is tied to the embedding
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from asyncrl_cli.base.errors import PreflightError, RefusedError
from asyncrl_cli.base.paths import expand
from asyncrl_cli.base.safe_files import UnsafeFile, load_json, open_regular
from asyncrl_cli.builtin.tiny import TAUGHT, TINY, UNTAUGHT
from asyncrl_cli.models.gguf_file import gguf_file, header_of
from asyncrl_cli.profile.fields import MOST

FAMILY = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Model types whose parameters can be computed from the configuration. For others they are counted in the
weight files."""
LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|blk)\.(\d+)\.")
"""Matches a tensor's name up to the number of its layer."""
BYTES_OF = {"float32": 4, "bfloat16": 2}
"""Bytes per value, by `model.dtype`."""
QWEN3_HEAD_DIM = 128
TINY_VOCABULARY = 64
"""Enough for the characters of most tasks and three special tokens. The real size is known only once the task
has been read."""


class ShapeUnknown(Exception):
    """A model's sizes cannot be read here. The message says why, for users."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """`layer_parameters` counts the largest layer, `root_parameters` all that is outside the layers
    (embedding, last norm, head).

    `remarks`: the assumptions made, for users.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_qk_norm: bool
    parameters: int
    layer_parameters: int
    root_parameters: int
    remarks: tuple[str, ...] = ()

    @property
    def kv_values_per_token(self) -> int:
        """Number of values in one token's keys and values, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


def parameters_of(paths: Iterable[str], otherwise: ModelShape) -> list[int]:
    """The number of parameters of each model; that of `otherwise` for one that has to be fetched."""
    found = list[int]()
    for path in paths:
        try:
            found.append(shape_of(path).parameters)
        except ShapeUnknown:
            found.append(otherwise.parameters)
    return found


def shape_of(path: str) -> ModelShape:
    """Sizes of a profile's `model.path`. Raises ShapeUnknown if that needs the network, or the files do not
    say."""
    if path in (TAUGHT, UNTAUGHT):
        remark = f"{path} with {TINY_VOCABULARY} characters: the task may have more"
        config = {"model_type": "qwen3", "vocab_size": TINY_VOCABULARY, **TINY}
        return shape_of_config(config, remarks=(remark,))
    directory = expand(path)
    if directory.is_dir():
        return shape_of_directory(directory)
    try:
        if (file := gguf_file(path)) is not None:
            header = header_of(file)
            return _counted(header.config, header.shapes, "its header")
    except PreflightError as error:
        raise ShapeUnknown(error.message) from None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    needs = "and the estimate needs its config.json"
    try:
        cached = try_to_load_from_cache(path, "config.json")
    except HFValidationError:  # not a valid hub name
        raise ShapeUnknown(f"directory {path} does not exist, {needs}") from None
    if not isinstance(cached, str):
        raise ShapeUnknown(f"{path} is not on this machine, {needs}; `asyncrl plan --ask-hub` downloads it")
    return shape_of_directory(Path(cached).parent)


def shape_of_directory(directory: Path) -> ModelShape:
    try:
        config = load_json(directory / "config.json", dict[str, Any])
    except RefusedError as error:
        raise ShapeUnknown(error.message) from None
    if isinstance(text_config := config.get("text_config"), dict):
        config |= text_config
    if str(config.get("model_type")) in FAMILY:
        return shape_of_config(config)
    kind = str(config.get("model_type"))
    try:
        files = [tensor_shapes(path) for path in sorted(directory.glob("*.safetensors"))]
    except PreflightError as error:
        raise ShapeUnknown(error.message) from None
    shapes = {name: shape for file in files for name, shape in file.items()}
    if not shapes:
        why = "without safetensors files, so its parameters cannot be counted"
        raise ShapeUnknown(f"{directory}: a {kind} model {why}")
    return _counted(config, shapes, "its files")


def shape_of_config(config: Mapping[str, Any], remarks: tuple[str, ...] = ()) -> ModelShape:
    """Sizes of a model of the llama family. `config`: the content of config.json."""
    sizes = _sizes(config)
    h, i = sizes["hidden_size"], sizes["intermediate_size"]
    a, j = sizes["num_heads"] * sizes["head_dim"], sizes["num_kv_heads"] * sizes["head_dim"]
    kind = config["model_type"]
    has_qk_norm = kind == "qwen3"
    layer = 2 * h * a + 2 * h * j + 3 * h * i + 2 * h
    if kind == "qwen2" or config.get("attention_bias"):
        layer += a + 2 * j + (0 if kind == "qwen2" else h)
    if config.get("mlp_bias"):
        layer += 2 * i + h
    if has_qk_norm:
        layer += 2 * sizes["head_dim"]
    heads = 1 if config.get("tie_word_embeddings", False) else 2
    root = heads * sizes["vocab_size"] * h + h
    return ModelShape(
        model_type=kind,
        **sizes,
        has_qk_norm=has_qk_norm,
        parameters=sizes["num_layers"] * layer + root,
        layer_parameters=layer,
        root_parameters=root,
        remarks=remarks,
    )


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
    kind = f"config.json of a {config.get('model_type', 'nameless')!s:.40} model"
    try:
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        default_head_dim = QWEN3_HEAD_DIM if config.get("model_type") == "qwen3" else hidden // heads
        sizes = {
            "vocab_size": int(config["vocab_size"]),
            "hidden_size": hidden,
            "intermediate_size": int(config["intermediate_size"]),
            "num_layers": int(config["num_hidden_layers"]),
            "num_heads": heads,
            "num_kv_heads": int(config.get("num_key_value_heads") or heads),
            "head_dim": int(config.get("head_dim") or default_head_dim),
        }
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise ShapeUnknown(f"{kind}: {error} is not as expected") from error
    wrong = next((name for name, size in sizes.items() if not 1 <= size <= MOST), None)
    if wrong is not None:
        raise ShapeUnknown(f"{kind}: {wrong} is not as expected")
    return sizes


def _counted(config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], where: str) -> ModelShape:
    """Sizes of any other model: parameters are counted by the shapes of its tensors, which are read
    `where`."""
    kind = str(config.get("model_type"))
    counts = {name: prod(shape) for name, shape in shapes.items()}
    layers: Counter[str] = Counter()
    for name, count in counts.items():
        if found := LAYER.search(name):
            # by the whole path: a second tower also numbers layers from 0
            layers[name[: found.end()]] += count
    return ModelShape(
        model_type=kind,
        **_sizes(config),
        has_qk_norm=False,
        parameters=sum(counts.values()),
        layer_parameters=max(layers.values(), default=0),
        root_parameters=sum(counts.values()) - sum(layers.values()),
        remarks=(f"{kind}: parameters counted in {where}; activations estimated as for a llama",),
    )


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes in a safetensors file by tensor name. Reads only the header, and checks the file's length
    against it.

    Raises PreflightError if the file is damaged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        open_regular(path).close()
        with safe_open(path, framework="numpy") as weights:
            names: list[str] = weights.keys()
            return {name: tuple(weights.get_slice(name).get_shape()) for name in names}
    except (SafetensorError, OSError, UnsafeFile) as error:
        hint = "copy or download it again"
        raise PreflightError(f"model.path: {path} is damaged: {error}", hint=hint) from error
