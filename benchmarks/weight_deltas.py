"""How many bytes deltas save (`weights.encoding`): how many elements of a model's bfloat16 weights a step
changes, and what its delta takes, by learning rate.

    python -m benchmarks.weight_deltas MODEL_DIR [--lr 1e-6 5e-6 2e-5] [--steps 6] [--rows 4] [--between 1 4]
        [--codecs lz4 zstd]
    python -m benchmarks.weight_deltas --random 1e9 [--share 0.008 0.05]

MODEL_DIR: a Hugging Face directory (asyncrl's model cache has those of GGUF files). Its float32 weights are
trained with AdamW (betas 0.9 and 0.99, as in a run; no warm-up) on the text of this repository's docs/, whose
gradients have the usual pattern: an embedding of a token that does not occur has none. `--between`: train
steps between two versions (K). The figures are those of the last version: in the first steps Adam's moments
are those of a few gradients.

There everything is counted, nothing timed. Every delta is applied to the version before and compared with
the new one.

`--random`: CPU seconds of one thread, for as many random parameters, of which the given shares change by a
last bit at random places: what a version takes on both sides in any case (its fingerprint, a copy), and what
deltas take in addition (`difference` at the trainer, `applied` at a worker).
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from asyncrl_cli.weights import deltas
from asyncrl_cli.weights.buckets import Bucket, BucketEntry, Packing, Spec, fingerprint, plan_layout
from asyncrl_cli.weights.receivers import SharedWeights

T = TypeVar("T")
BUCKET_BYTES = 2**26
TOKENS = 64


@dataclass(frozen=True, slots=True)
class Measured:
    changed_ratio: float
    sent_ratio: dict[str, float]


def packed(model: PreTrainedModel, dtype: str) -> list[Bucket]:
    named = dict(model.named_parameters())
    specs = [Spec(name=name, dtype=dtype, shape=tuple(one.shape)) for name, one in named.items()]
    packing = Packing(plan_layout(specs, BUCKET_BYTES))
    with torch.no_grad():
        for name, one in named.items():
            packing.put(name, one)
    return packing.seal()


def measured(new: Sequence[Bucket], old: Sequence[Bucket], codecs: Sequence[str]) -> Measured:
    total = sum(len(bucket.data) for bucket in new)
    pairs = list(zip(new, old, strict=True))
    views = [[one.data.view(np.uint16) for one in pair] for pair in pairs]
    num_changed = sum(int((ours != theirs).sum()) for ours, theirs in views)
    sent = {}
    for codec in codecs:
        deltas.CODEC = codec
        sent[codec] = 0
        for ours, theirs in pairs:
            delta = deltas.difference(ours, theirs, base=0)
            sent[codec] += len(ours.data) if delta is None else delta.sent_bytes
            assert delta is None or np.array_equal(
                deltas.applied(delta, SharedWeights([theirs])).data, ours.data
            )
    return Measured(num_changed / (total / 2), {codec: count / total for codec, count in sent.items()})


def batches(tokenizer: object, size: int) -> Iterator[torch.Tensor]:
    """Endless pieces of the docs, `size` at a time."""
    text = "\n".join(page.read_text() for page in sorted(Path("docs").glob("*.md")))
    ids = torch.tensor(tokenizer(text)["input_ids"])  # type: ignore[operator]
    rows = ids[: len(ids) // TOKENS * TOKENS].view(-1, TOKENS)
    while True:
        for start in range(0, len(rows) - size, size):
            yield rows[start : start + size]


def timed(parameters: int, share: float) -> dict[str, float]:
    """CPU seconds by what they were spent on, and the bytes of the delta as a share of all."""
    draw, spent, sent_bytes = np.random.default_rng(0), Counter[str](), 0
    elements = BUCKET_BYTES // 2
    entry = BucketEntry(spec=Spec(name="w", dtype="bfloat16", shape=(elements,)), offset_bytes=0)
    values = torch.empty(elements).normal_(std=0.02).bfloat16().view(torch.int16).numpy()
    old = Bucket(data=values.view(np.uint8), entries=(entry,))
    held = SharedWeights([old])
    for _ in range(count := round(2 * parameters / BUCKET_BYTES)):
        changed = values.copy()
        changed[draw.choice(elements, int(share * elements), replace=False)] += 1
        new = Bucket(data=changed.view(np.uint8), entries=(entry,))

        def spend(what: str, call: Callable[[], T]) -> T:
            began_s = time.thread_time()
            result = call()
            spent[what] += time.thread_time() - began_s
            return result

        spend("fingerprint", partial(fingerprint, new))
        spend("copy", new.data.copy)
        delta = spend("difference", partial(deltas.difference, new, old, 0))
        assert delta is not None
        made = spend("applied", partial(deltas.applied, delta, held))
        assert np.array_equal(made.data, new.data)
        sent_bytes += delta.sent_bytes
    return {**spent, "sent": sent_bytes / (count * BUCKET_BYTES)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model_dir", type=Path, nargs="?")
    parser.add_argument("--random", type=float, metavar="PARAMETERS")
    parser.add_argument("--share", type=float, nargs="+", default=[0.008, 0.05])
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 5e-6, 2e-5])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rows", type=int, default=4, help=f"of {TOKENS} tokens, in a step")
    parser.add_argument("--between", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--codecs", nargs="+", default=["lz4", "zstd"])
    options = parser.parse_args()
    if options.random:
        for share in options.share:
            found = timed(int(options.random), share)
            shown = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in found.items() if name != "sent")
            print(f"{share:.1%} changed: {shown}; {found['sent']:.2%} of the bytes", flush=True)
        return
    if options.model_dir is None:
        parser.error("MODEL_DIR or --random PARAMETERS")
    tokenizer = AutoTokenizer.from_pretrained(options.model_dir)
    print("| lr | train steps between versions | elements changed | " + " | ".join(options.codecs) + " |")
    for lr in options.lr:
        model = AutoModelForCausalLM.from_pretrained(options.model_dir, dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.0)
        text, versions = batches(tokenizer, options.rows), [packed(model, "bfloat16")]
        for _ in range(options.steps):
            rows = next(text)
            model(input_ids=rows, labels=rows).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            versions = [*versions, packed(model, "bfloat16")][-1 - max(options.between) :]
        for between in options.between:
            found = measured(versions[-1], versions[-1 - between], options.codecs)
            sent = " | ".join(f"{found.sent_ratio[codec]:.2%}" for codec in options.codecs)
            print(f"| {lr:g} | {between} | {found.changed_ratio:.2%} | {sent} |", flush=True)
        del model, optimizer, versions
        gc.collect()


if __name__ == "__main__":
    main()
