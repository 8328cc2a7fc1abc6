"""A version's files with `weights.transport = "directory"` or `"disk"`: rank 0 writes them bucket by bucket,
and workers fetch buckets by their refs.

A file is a safetensors file with a bucket's tensors end to end. It is written and read in pieces of
CHUNK_BYTES, so that neither end holds a bucket twice.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import accumulate, chain, pairwise

import xxhash

from asyncrl_cli.models.model_files import weights_file
from asyncrl_cli.weights.buckets import Bucket, DamagedWeights, Layout, zeros
from asyncrl_cli.weights.deltas import Delta, RangeChanges
from asyncrl_cli.weights.directory import Directory
from asyncrl_cli.weights.versions import MANIFEST, SCHEMA_VERSION, Manifest, Probes, Sender, version_name

CHUNK_BYTES = 32 * 2**20
"""Most that one call to the store reads or writes."""
KINDS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64", "bool": "BOOL"}
KINDS |= {
    f"{kind}int{bits}": f"{kind[:1].upper() or 'I'}{bits}" for kind in ("", "u") for bits in (8, 16, 32, 64)
}
KINDS |= {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}
"""safetensors' names of torch's dtypes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketObject:
    """A bucket's ref at a URL: its file there, and the layout of the tensors in it."""

    directory: Directory
    path: str
    entries: Layout

    @property
    def version_at(self) -> str:
        return f"{self.directory.url}/{self.path.rpartition('/')[0]}"

    def read(self) -> Bucket:
        """Fetch the bucket, in a worker. Raises AsyncrlError if the file is missing or cannot be read,
        DamagedWeights if it holds other tensors."""
        header, ends = header_of(self.entries), list(_ends(self.entries))
        if self.directory.read(self.path, 0, len(header)) != header:
            raise self._refused("it holds other tensors than were published")
        data = zeros(self.entries[-1].end_bytes)
        for begin in range(0, ends[-1], CHUNK_BYTES):
            end = min(begin + CHUNK_BYTES, ends[-1])
            part = self.directory.read(self.path, len(header) + begin, len(header) + end)
            if len(part) != end - begin:
                raise self._refused("it ends early")
            data[begin:end] = memoryview(part)
        # The file has the tensors end to end. From the last one on, each moves up to its aligned place.
        for entry, end in zip(reversed(self.entries), reversed(ends), strict=True):
            data[entry.offset_bytes : entry.end_bytes] = data[end - entry.spec.num_bytes : end]
        bucket = Bucket(data=data, entries=self.entries)
        bucket.clear_gaps()
        return bucket

    def _refused(self, why: str) -> DamagedWeights:
        hint = "the worker keeps its old weights; `asyncrl resume` publishes anew"
        return DamagedWeights(f"weights in {self.directory.url}/{self.path} are refused: {why}", hint=hint)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaObject:
    """A delta's ref at a URL: its file there, which has the parts of its ranges end to end, and the delta
    without them. `lengths`: of the three parts of each range, in bytes."""

    directory: Directory
    path: str
    frame: Delta
    lengths: tuple[tuple[int, int, int], ...]

    def read(self) -> Delta:
        """Raises AsyncrlError if the file cannot be read. One of another length does not fit, or is not what
        was published: the bucket that it makes is verified."""
        content, ranges, end = self.directory.read(self.path), list[RangeChanges](), 0
        for one, lengths in zip(self.frame.ranges, self.lengths, strict=True):
            parts = [
                content[end + begin : end + until]
                for begin, until in pairwise(accumulate(lengths, initial=0))
            ]
            ranges.append(RangeChanges(count=one.count, distances=parts[0], changes=parts[1], large=parts[2]))
            end += sum(lengths)
        return replace(self.frame, ranges=tuple(ranges))


class DirectorySender(Sender):
    """Rank 0's end. The directory belongs to one run."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    def begin(self, version: int, num_buckets: int) -> None:
        self._name, self._num_buckets = version_name(version), num_buckets
        self._fingerprints: dict[str, str] = {}
        self._directory.remove(self._name, first=MANIFEST)  # a resumed run publishes a version again

    def put(self, bucket: Bucket) -> BucketObject:
        index, total = len(self._fingerprints), self._num_buckets
        file = weights_file(index, total)

        def pieces() -> Iterator[bytes | memoryview]:
            whole = xxhash.xxh3_64()
            for piece in file_pieces(bucket):
                whole.update(piece)
                yield piece
            self._fingerprints[file] = whole.hexdigest()

        ref = BucketObject(directory=self._directory, path=f"{self._name}/{file}", entries=bucket.entries)
        self._directory.write(ref.path, pieces)
        return ref

    def put_delta(self, delta: Delta, whole: BucketObject) -> DeltaObject:
        path = whole.path.replace(".safetensors", ".delta")
        parts = [(one.distances, one.changes, one.large) for one in delta.ranges]
        self._directory.write(path, lambda: chain.from_iterable(parts))
        empty = tuple(replace(one, distances=b"", changes=b"", large=b"") for one in delta.ranges)
        lengths = tuple((len(a), len(b), len(c)) for a, b, c in parts)
        frame = replace(delta, ranges=empty)
        return DeltaObject(directory=self._directory, path=path, frame=frame, lengths=lengths)

    def finish(self, manifest: Manifest) -> None:
        content = {
            "schema_version": SCHEMA_VERSION,
            "version": manifest.version,
            "files": self._fingerprints,
            "probes": {one.name: getattr(manifest, one.name) for one in fields(Probes)},
        }
        text = json.dumps(content, indent=2).encode()
        self._directory.write(f"{self._name}/{MANIFEST}", lambda: iter([text]))

    def keep(self, wanted: Collection[int]) -> None:
        self._directory.keep(wanted)


def header_of(entries: Layout) -> bytes:
    """The beginning of a safetensors file with these tensors end to end: the length of a description, and the
    description, filled up to 8 bytes (safetensors' README, "Format")."""
    described: dict[str, Mapping[str, object]] = {"__metadata__": {"format": "pt"}}
    for entry, end in zip(entries, _ends(entries), strict=True):
        spec, kind = entry.spec, KINDS[entry.spec.dtype]
        offsets = [end - spec.num_bytes, end]
        described[spec.name] = {"dtype": kind, "shape": list(spec.shape), "data_offsets": offsets}
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def file_pieces(bucket: Bucket) -> Iterator[bytes | memoryview]:
    """A bucket as a safetensors file, without a second copy of it."""
    yield header_of(bucket.entries)
    for entry in bucket.entries:
        for begin in range(entry.offset_bytes, entry.end_bytes, CHUNK_BYTES):
            yield bucket.data[begin : min(begin + CHUNK_BYTES, entry.end_bytes)].data


def _ends(entries: Layout) -> Iterator[int]:
    """Where each tensor ends if they lie end to end."""
    return accumulate(entry.spec.num_bytes for entry in entries)
