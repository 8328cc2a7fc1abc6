"""A model in one GGUF file, as llama.cpp uses them: what its header says, and a Hugging Face directory made
of it, once, in the model cache.

    header   format, metadata and the tensors' shapes; read without torch and without the package gguf
    check    whether transformers can convert it: the architecture, all parts in one file, a tokenizer
    convert  the weights, dequantised to float32, with configuration, tokenizer and chat template
"""

from __future__ import annotations

import hashlib
import mmap
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from asyncrl_cli.base.errors import PreflightError, first_line
from asyncrl_cli.base.paths import expand, missing_hint
from asyncrl_cli.base.safe_files import UnsafeFile, open_regular, reason
from asyncrl_cli.base.storage import appearing_directory, naming, storage_error

SUFFIX, PACKAGE = ".gguf", "package:"
SPLIT_NAME = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
NEEDS = "gguf", "accelerate"
"""The packages with which transformers converts a file: the extra [gguf]."""
MAGIC, STRING, ARRAY = b"GGUF", 8, 9
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Types of metadata as `struct` names them."""
SIZES = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "vocab_size": "vocab_size",
}
"""Keys of config.json, and those of the header, which stand after the architecture's name."""
TOKENS = "tokenizer.ggml.tokens"
Progress = Callable[[str, int, int, str], None]


def refused(why: str, hint: str) -> PreflightError:
    return PreflightError(f"model.path: {why}", hint=hint)


def gguf_file(path: str) -> Path | None:
    """The file that `model.path` names: a path that ends in .gguf, or `package:NAME/FILE.gguf`, a file of an
    installed Python package. None if it names something else. Raises PreflightError if it is not there."""
    if not path.endswith(SUFFIX):
        return None
    if not path.startswith(PACKAGE):
        file = expand(path)
        if not file.exists():
            raise refused(f"{path} does not exist", missing_hint(file))
        return file
    name, _, inside = path.removeprefix(PACKAGE).partition("/")
    # a package of one name is found without being imported: its imports may be missing
    found = find_spec(name) if name.isidentifier() else None
    if found is None or not found.submodule_search_locations:
        hint = f"pip install --no-deps {' '.join((name.replace('_', '-'), *NEEDS))}"
        raise refused(f"{path}: the package {name!r} is not installed", hint)
    file = Path(found.submodule_search_locations[0]) / inside
    if not file.exists():
        raise refused(f"{path}: {file} does not exist", missing_hint(file))
    return file


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """`metadata`: by key; `shapes`: by tensor, fastest dimension first."""

    metadata: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    @property
    def config(self) -> dict[str, Any]:
        """The sizes, by their keys in config.json."""
        tokens = len(self.metadata.get(TOKENS, ()))
        given = {name: self.metadata.get(f"{self.architecture}.{key}") for name, key in SIZES.items()}
        sizes = {"vocab_size": tokens, **{name: size for name, size in given.items() if size is not None}}
        return {"model_type": self.architecture, **sizes}


def header_of(file: Path) -> Header:
    """Raises PreflightError for a file that is no GGUF file, or is cut off before its last tensor."""
    try:
        with open_regular(file) as opened:
            found = opened.fileno()
            with mmap.mmap(found, 0, access=mmap.ACCESS_READ) as content:
                return _parsed(content)
    except UnsafeFile as error:
        raise refused(f"{file}: {error}", "name the .gguf file itself") from None
    except OSError as error:
        raise refused(f"{file} cannot be read: {reason(error)}", "check its permissions") from None
    except (struct.error, KeyError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        why = f"{file} is no GGUF file, or damaged: {first_line(error)}"
        raise refused(why, "copy or download it again") from None


def _parsed(content: mmap.mmap) -> Header:
    if content[:4] != MAGIC:
        raise ValueError(f"it begins with {content[:4]!r}")
    at = len(MAGIC)

    def number(kind: str) -> Any:
        nonlocal at
        (value,) = struct.unpack_from(f"<{kind}", content, at)
        at += struct.calcsize(f"<{kind}")
        return value

    def text() -> str:
        nonlocal at
        length = number("Q")
        if length > len(content) - at:
            raise ValueError("a text ends after the file")
        at += length
        return content[at - length : at].decode(errors="replace")

    def value(kind: int) -> Any:
        if kind == STRING:
            return text()
        if kind == ARRAY:
            inner, length = number("I"), number("Q")
            return [value(inner) for _ in range(length)]
        return number(NUMBERS[kind])

    number("I")  # the format's version
    num_tensors, num_keys = number("Q"), number("Q")
    metadata = {text(): value(number("I")) for _ in range(num_keys)}
    shapes, last = dict[str, tuple[int, ...]](), 0
    for _ in range(num_tensors):
        name, dimensions = text(), number("I")
        shapes[name] = tuple(number("Q") for _ in range(dimensions))
        number("I")  # its quantisation
        last = max(last, number("Q"))
    if at + last >= len(content):
        raise ValueError("its tensors end after the file")
    return Header(metadata=metadata, shapes=shapes)


def check_gguf(file: Path) -> None:
    """Raises PreflightError if the file cannot be converted, or a package is missing."""
    stat = file.stat()
    _check(file, stat.st_size, stat.st_mtime_ns)


@cache
def _check(file: Path, *version_of_file: int) -> None:
    header = header_of(file)
    if SPLIT_NAME.search(file.name) or header.metadata.get("split.count", 1) > 1:
        hint = "llama-gguf-split --merge FIRST-PART.gguf WHOLE.gguf joins them"
        raise refused(f"{file} is one of several parts of a model", hint)
    if not header.metadata.get(TOKENS):
        why, hint = f"{file} holds no tokenizer", "take a file that llama.cpp's convert_hf_to_gguf.py wrote"
        raise refused(why, hint)
    if missing := [name for name in NEEDS if find_spec(name) is None]:
        what = f"reading {file.name} needs the packages {' and '.join(NEEDS)}"
        raise refused(what, f"pip install {' '.join(missing)} (the extra [gguf])")
    # imported late: it takes seconds
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    known = {name.replace("_", "") for name in GGUF_SUPPORTED_ARCHITECTURES}
    if header.architecture.replace("-", "").replace("_", "") not in known:
        why = f'{file} holds a model of the architecture "{header.architecture:.40}"'
        hint = f"transformers {version('transformers')} converts {', '.join(GGUF_SUPPORTED_ARCHITECTURES)}"
        raise refused(f"{why}, which transformers cannot convert", hint)


def converted_directory(file: Path, cache_dir: Path) -> Path:
    """Where the converted model is, or will be. A changed file, or another transformers, has another."""
    stat = file.stat()
    facts = f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns} {version('transformers')}"
    return cache_dir / f"gguf-{file.stem:.60}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}"


def converted(file: Path, cache_dir: Path, progress: Progress) -> Path:
    """The converted model, made unless it is in the cache. Raises PreflightError."""
    directory = converted_directory(file, cache_dir)
    if directory.is_dir():
        return directory
    check_gguf(file)
    try:
        with appearing_directory(directory) as working, naming(working):
            _convert(file, working, progress)
    except OSError as error:
        if not directory.is_dir():  # else another run has made it meanwhile
            why, hint = storage_error(error).message, "set model.cache_dir to a directory with enough room"
            raise PreflightError(f"model.cache_dir: {why}", hint=hint) from error
    return directory


def _convert(file: Path, working: Path, progress: Progress) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, modeling_gguf_pytorch_utils
    from transformers.utils import logging

    doing = f"converting {file.name}, once"
    progress(doing, 0, 0, "")
    logging.disable_progress_bar()

    def counted(tensors: Sequence[Any], **_: Any) -> Iterator[Any]:
        for number, tensor in enumerate(tensors, 1):
            progress(doing, number, len(tensors), "tensors")
            yield tensor

    # transformers shows a bar of its own here, which nothing switches off
    bar, modeling_gguf_pytorch_utils.tqdm = modeling_gguf_pytorch_utils.tqdm, counted
    try:
        where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**where)
    except (ValueError, KeyError, IndexError, TypeError, NotImplementedError, RuntimeError) as error:
        # The header was whole: what transformers and gguf raise for bad contents has no common class.
        why = f"transformers cannot convert {file}: {first_line(error)}"
        raise refused(why, "copy or download it again, or use the model's safetensors") from error
    finally:
        modeling_gguf_pytorch_utils.tqdm = bar
    model.hf_quantizer = None  # its weights are no longer quantised, and transformers saves only such
    del model.config.quantization_config
    model.save_pretrained(working)
    tokenizer.save_pretrained(working)
