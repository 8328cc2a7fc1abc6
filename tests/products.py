"""Which matrix products some code computes, and in which dtype: by torch's own profiler, in all threads."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import ProfilerActivity, _ExperimentalConfig, profile

PRODUCTS = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::baddbmm",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
)


@contextmanager
def counted_products(directory: Path) -> Iterator[Counter[tuple[str, str]]]:
    """(operation, dtype of its last matrix) and how often, once the block has ended."""
    products: Counter[tuple[str, str]] = Counter()
    everywhere = _ExperimentalConfig(profile_all_threads=True)
    with profile(
        activities=[ProfilerActivity.CPU], record_shapes=True, experimental_config=everywhere
    ) as profiled:
        yield products
    profiled.export_chrome_trace(str(directory / "trace.json"))
    for event in json.loads((directory / "trace.json").read_text(encoding="utf-8"))["traceEvents"]:
        if event.get("name") in PRODUCTS:
            dtypes = [kind for kind in event["args"]["Input type"] if kind not in ("", "Scalar")]
            products[event["name"], dtypes[1]] += 1
