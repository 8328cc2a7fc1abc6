"""The rollout worker's side: how it gets a version, and checks it, before its engine loads it. The other side
is senders.py.

    object-store, disk   refs -> buckets -> verified -> SharedWeights(buckets)  bytes, in this node's memory
    a directory          read_version(directory) -> manifest, buckets -> the same
    nccl, ipc            refs are layouts: AnnouncedWeights(layouts)            no bytes until the load
    lora.sync = adapter  verified -> BaseFiles.whole(buckets): adapters in, whole weights out (if the engine
                         does not apply adapters itself)

The engine's processes, and the other workers of the node (node_buffer.py), map the memory of SharedWeights:
an anonymous file (memfd), one flat buffer. Processes of the same user open it through /proc. It does not
count against the size of /dev/shm, and it disappears when the last process that maps it ends, even by
SIGKILL. Once it is full it is sealed: the kernel then refuses every write to it, so that what one process has
verified is what all of them read.

A worker that merges adapters reads the base model's files again for each version, tensor by tensor, and keeps
no copy. The result is what rank 0 would have sent, so its engine need not know of adapters.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
import psutil
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_tensors

from asyncrl_cli.base.errors import AsyncrlError, ConfigError, RefusedError, first_names
from asyncrl_cli.base.safe_files import MAX_JSON_BYTES, Count, parse_json
from asyncrl_cli.models.model_files import tensor_files
from asyncrl_cli.models.saved_form import ADAPTER, SavedForm, adapter_names, merged, scale_of, skeleton
from asyncrl_cli.profile.check import holds_credentials
from asyncrl_cli.profile.schema import Profile
from asyncrl_cli.weights.buckets import (
    ALIGNMENT_BYTES,
    Bucket,
    BucketEntry,
    BufferPool,
    DamagedWeights,
    Layout,
    Packing,
    Spec,
    Unpacked,
    are_whole,
    dtype_name,
    fingerprint,
    plan_layout,
    torch_dtype,
    view_of,
)
from asyncrl_cli.weights.directory import Directory
from asyncrl_cli.weights.versions import (
    MANIFEST,
    NO_PROBES,
    SCHEMA_VERSION,
    Manifest,
    Probes,
    UpdateInfo,
    file_fingerprint,
)

FILE_NAME = "asyncrl-weights-"
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
"""memfd_create(2), fcntl(2)."""


def verified(buckets: Iterable[Bucket], manifest: Manifest) -> Iterator[Bucket]:
    """Yield the buckets as they arrive, each once its fingerprint has been compared with the manifest's.

    Only after the last bucket is the version known to be complete. Load nothing before that.

    Raises:
        DamagedWeights: if a bucket differs, the number of buckets is wrong, or the rows that came are not all
        of a tensor; the message names the version and the bucket or tensor.
    """
    count, arrived = len(manifest.fingerprints), 0
    rows: dict[str, list[Spec]] = {}
    for bucket in buckets:
        if arrived < count:
            # not `bucket.fingerprint`, which may have been computed before the transport
            found, expected = fingerprint(bucket), manifest.fingerprints[arrived]
            if found != expected:
                raise DamagedWeights(
                    f"weights of version {manifest.version}: bucket {arrived} of {count} ({len(bucket.data)} "
                    f"bytes) arrived damaged: fingerprint {found:016x}, published as {expected:016x}",
                    hint="the transport changed or mixed bytes; the worker keeps its old weights",
                )
            for entry in bucket.entries:
                rows.setdefault(entry.spec.name, []).append(entry.spec)
            yield bucket
        arrived += 1
    if arrived != count:
        why = f"{arrived} buckets arrived, {count} were sent"
        raise DamagedWeights(f"weights of version {manifest.version}: {why}")
    if incomplete := [name for name, specs in rows.items() if not are_whole(specs)]:
        why = f"rows are missing or came twice: {first_names(incomplete)}"
        raise DamagedWeights(f"weights of version {manifest.version}: {why}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPlace:
    """Where other processes of this machine find a sealed buffer, how they know it, and what lies in it."""

    path: str
    version: int
    fingerprint: str
    num_bytes: int
    entries: Layout


class SharedWeights(dict[str, torch.Tensor]):
    """All tensors of one version by name; aliases map to the same tensor. The tensors are views of the shared
    buffer, which nobody can write to."""

    def __init__(self, buckets: Iterable[Bucket], version: int = 0, fingerprint: str = "") -> None:
        """Copy each bucket as it arrives, so that the whole version is never held twice."""
        self.version, self.fingerprint, self._num_bytes = version, fingerprint, 0
        self._entries: dict[str, BucketEntry] = {}
        self._hold(os.memfd_create(FILE_NAME + fingerprint, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        try:
            for bucket in buckets:
                self._make_room(entry.spec.whole for entry in bucket.entries)
                for entry in bucket.entries:
                    place = self._entries[entry.spec.name].offset_bytes + entry.spec.begin_bytes
                    data = memoryview(bucket.data.data)[entry.offset_bytes : entry.end_bytes]
                    while data:  # the kernel may write less than it was given
                        written = os.pwrite(self._descriptor, data, place)
                        data, place = data[written:], place + written
            self._grow(1)  # an empty file cannot be mapped
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, SEALS)
        except BaseException:
            self._close()
            raise
        self._map()

    @classmethod
    def opened(cls, place: SharedPlace) -> SharedWeights:
        """The same buffer in another process. Raises OSError if nobody holds it any more, ValueError if what
        is there is not this sealed buffer."""
        weights = cls.__new__(cls)
        weights._hold(os.open(place.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        weights.version, weights.fingerprint = place.version, place.fingerprint
        weights._num_bytes = os.fstat(weights._descriptor).st_size
        weights._entries = {entry.spec.name: entry for entry in place.entries}
        name = os.readlink(f"/proc/self/fd/{weights._descriptor}")
        ends = (entry.end_bytes for entry in place.entries)
        if (
            not name.startswith(f"/memfd:{FILE_NAME}{place.fingerprint} ")
            or fcntl.fcntl(weights._descriptor, fcntl.F_GET_SEALS) & SEALS != SEALS
            or not max(ends, default=0) <= weights._num_bytes == place.num_bytes
        ):
            raise ValueError(f"{place.path} is {name} of {weights._num_bytes} bytes, not {place.fingerprint}")
        weights._map()
        return weights

    @property
    def place(self) -> SharedPlace:
        """Valid as long as this object lives."""
        return SharedPlace(
            path=f"/proc/{os.getpid()}/fd/{self._descriptor}",
            version=self.version,
            fingerprint=self.fingerprint,
            num_bytes=self._num_bytes,
            entries=tuple(self._entries.values()),
        )

    def describe(self, required: Collection[str]) -> UpdateInfo:
        """Plain values that tell another process on this machine where the buffer is, and where each tensor
        lies in it.

        Valid as long as this object lives. A tensor is described under its first name that is in `required`,
        or left out.
        """
        tensors = [
            (name, entry.spec.dtype, list(entry.spec.shape), entry.offset_bytes)
            for entry in self._entries.values()
            if (name := entry.spec.name_among(required)) is not None
        ]
        path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        return {"path": path, "num_bytes": self._num_bytes, "tensors": tensors}

    def whole(self) -> Bucket:
        """All of it as one bucket of whole tensors."""
        return Bucket(data=self._mapped, entries=tuple(self._entries.values()))

    def bucket(self, entries: Layout) -> Bucket:
        """These tensors, or rows of them, in a new bucket of this layout. Raises KeyError or ValueError for
        what is not here."""
        num_bytes = entries[-1].end_bytes
        # rounded up, so that buckets of almost the same size are the same memory; unused pages take none
        data = self._scratch.take(1 << (num_bytes - 1).bit_length())[:num_bytes]
        bucket = Bucket(data=data, entries=entries)
        bucket.clear_gaps()
        for entry in entries:
            begin = self._entries[entry.spec.name].offset_bytes + entry.spec.begin_bytes
            rows = self._mapped[begin : begin + entry.spec.num_bytes]
            bucket.data[entry.offset_bytes : entry.end_bytes] = rows
        return bucket

    def touch(self) -> None:
        """Map all pages now, and not in the pause in which they are loaded. Blocks, but not other threads:
        numpy releases the GIL, which a mapping with MAP_POPULATE would hold."""
        self._mapped[:: mmap.PAGESIZE].max()

    def _hold(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._close = weakref.finalize(self, os.close, descriptor)
        self._scratch = BufferPool(pins=False)  # few buckets are there at a time; new pages take longer

    def _map(self) -> None:
        mapped = mmap.mmap(self._descriptor, self._num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
        self._mapped = np.frombuffer(mapped, dtype=np.uint8)
        for entry in self._entries.values():
            self |= dict.fromkeys(entry.spec.names, view_of(self._mapped, entry))

    def _make_room(self, wholes: Iterable[Spec]) -> None:
        """Places for the tensors that have none yet, from the first rows on that arrive."""
        end_bytes = self._num_bytes
        for spec in wholes:
            if spec.name not in self._entries:
                begin_bytes = -(-end_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
                self._entries[spec.name] = entry = BucketEntry(spec=spec, offset_bytes=begin_bytes)
                end_bytes = entry.end_bytes
        self._grow(end_bytes)

    def _grow(self, num_bytes: int) -> None:
        """Grow the file to at least that size and allocate its pages. Raises AsyncrlError if memory is short:
        the kernel would kill processes rather than refuse."""
        missing = num_bytes - self._num_bytes
        if missing <= 0:
            return
        available = psutil.virtual_memory().available
        if missing > available:
            sizes = (missing, available, self._num_bytes)
            taken, free, arrived = (f"{size / 2**20:.0f} MiB" for size in sizes)
            held = f" beside the {arrived} that have arrived" if self._num_bytes else ""
            why = f"received weights take {taken} of memory{held}, but only {free} are free"
            hint = "a node holds the next version's weights in memory beside its engines"
            raise AsyncrlError(why, hint=f"{hint}: give the machine more")
        os.posix_fallocate(self._descriptor, self._num_bytes, missing)
        self._num_bytes = num_bytes


class AnnouncedWeights(dict[str, torch.Tensor]):
    """A version of which only the layouts are known: maps all names, with aliases, to meta tensors of the
    right shape and dtype."""

    def __init__(self, layouts: Iterable[Layout]) -> None:
        wholes = (entry.spec.whole for layout in layouts for entry in layout)
        self.specs: tuple[Spec, ...] = tuple(dict.fromkeys(wholes))
        for spec in self.specs:
            empty = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="meta")
            self |= dict.fromkeys(spec.names, empty)

    def chosen(self, required: Collection[str]) -> list[tuple[str, Spec]]:
        """The tensors that an engine will load, each once, under its first name that is in `required`. Others
        are left out."""
        return [(name, spec) for spec in self.specs if (name := spec.name_among(required)) is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestFile:
    """The content of manifest.json (senders.py)."""

    schema_version: int
    version: Count
    files: Mapping[str, str]
    probes: Probes = NO_PROBES


def read_version(directory: Directory) -> tuple[Manifest, list[Bucket]]:
    """Read a version and its buckets, one per file, for `Loader.prefetch`. Blocks, and holds the whole
    version in memory.

    Raises RefusedError for an unusable manifest, DamagedWeights for a file with another fingerprint, or that
    is none of safetensors; AsyncrlError for what the directory does not give.
    """
    path, hint = f"{directory.url}/{MANIFEST}", "it names the version and a fingerprint for each weight file"
    try:
        found = parse_json(directory.read(MANIFEST, 0, MAX_JSON_BYTES), ManifestFile)
    except ValueError as wrong:
        raise RefusedError(f"{path} cannot be read: {wrong}", hint=hint) from None
    names = [*found.files]
    if found.schema_version != SCHEMA_VERSION or not names or any(Path(name).name != name for name in names):
        why = f"{path} is refused: schema {found.schema_version}, files {first_names(names)}"
        raise RefusedError(why, hint=f"schema {SCHEMA_VERSION}, and names of files beside it: {hint}")
    buckets = [_read_file(directory, name, found.files[name]) for name in sorted(names)]
    return manifest_of(buckets, found.version, found.probes), buckets


def read_weights(path: str, version: int | None, next_version: int) -> tuple[Manifest, list[Bucket]]:
    """The weights in a directory or at a URL, as `version` if that is given. A directory without
    manifest.json (any model's) has no version of its own, and gets `next_version`. Raises as `read_version`
    does."""
    if "://" in path and holds_credentials(path):
        raise RefusedError("the URL holds credentials: the server's environment is the place for them")
    directory = Directory(path.rstrip("/") if "://" in path else f"file://{os.path.abspath(path)}")
    if "://" in path or os.path.exists(os.path.join(path, MANIFEST)):
        manifest, buckets = read_version(directory)
    else:
        if not (files := sorted(Path(path).glob("*.safetensors"))):
            raise RefusedError(f"{path} holds neither {MANIFEST} nor safetensors files")
        buckets = [_read_file(directory, file.name) for file in files]
        manifest = manifest_of(buckets, next_version)
    return manifest if version is None else replace(manifest, version=version), buckets


def _read_file(directory: Directory, name: str, expected: str | None = None) -> Bucket:
    content = directory.read(name)
    if expected is not None and (fingerprint := file_fingerprint(content)) != expected:
        why = f"has the fingerprint {fingerprint}, but its manifest says {expected}"
        raise DamagedWeights(f"{directory.url}/{name} {why}")
    try:
        return packed(load_tensors(content))
    except (SafetensorError, ValueError) as error:
        raise DamagedWeights(f"{directory.url}/{name} cannot be read: {error}") from error


def manifest_of(buckets: Sequence[Bucket], version: int, probes: Probes = NO_PROBES) -> Manifest:
    """Of whole tensors; those of others come without probes. Its fingerprint is the same in whatever order
    and buckets they come: from files, or by broadcasts."""
    whole = xxhash.xxh3_64()
    entries = ((entry, bucket.data) for bucket in buckets for entry in bucket.entries)
    for entry, data in sorted(entries, key=lambda one: one[0].spec.name):
        whole.update(repr(entry.spec).encode())
        whole.update(data[entry.offset_bytes : entry.end_bytes].data)
    return Manifest(
        version=version,
        num_bytes=sum(len(bucket.data) for bucket in buckets),
        fingerprints=tuple(bucket.fingerprint for bucket in buckets),
        of_tensors=whole.hexdigest(),
        **asdict(probes),
    )


def packed(tensors: Mapping[str, torch.Tensor], dtype: str = "") -> Bucket:
    """One bucket of these tensors, each in its own dtype or all in `dtype`."""
    specs = [
        Spec(name=name, dtype=dtype or dtype_name(tensor.dtype), shape=tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]
    packing = Packing(plan_layout(specs, sys.maxsize))
    for name, tensor in tensors.items():
        packing.put(name, tensor)
    return packing.buckets[0]


class BaseFiles:
    """The files of the base model with which this worker's engine started (`lora.sync = "adapter"`)."""

    def __init__(self, profile: Profile, model_dir: Path) -> None:
        """Raises ConfigError if tensors have other names or shapes in the model's files than in memory, or
        are missing there."""
        self._scale = scale_of(profile.lora)
        form = SavedForm(skeleton(model_dir, trust_remote_code=profile.model.trust_remote_code))
        required, known, files = form.required, form.known, tensor_files(model_dir)
        if form.converts or (missing := sorted(required.keys() - files.keys())):
            why = "are joined in memory" if form.converts else f"lack {first_names(missing)}"
            why = f"the tensors of {model_dir} {why}, so workers cannot merge adapters into them"
            raise ConfigError(f'lora.sync = "adapter": {why}', hint="--set lora.sync=merged")
        self._files = {name: path for name, path in files.items() if name in known}
        # rank 0 sends parameters in the profile's dtype, and buffers in their own
        self._dtypes = {
            name: profile.model.dtype if name in required else dtype_name(known[name].dtype)
            for name in self._files
        }

    def whole(self, buckets: Iterable[Bucket]) -> Iterator[Bucket]:
        """Yield all weights, a bucket per tensor, once all adapters have arrived. Buckets of whole weights,
        which another trainer may send through the gateway, pass unchanged. Raises ValueError if an adapter
        belongs to no weight."""
        arriving = iter(buckets)
        first = next(arriving, None)
        if first is None:
            return
        if not any(ADAPTER in entry.spec.name for entry in first.entries):
            yield first
            yield from arriving
            return
        adapters = Unpacked(chain([first], arriving))
        known = {name for weight in self._files for name in adapter_names(weight)}
        if foreign := sorted(adapters.keys() - known):
            what = "adapters arrived for weights that the base model does not have"
            raise ValueError(f"{what}: {first_names(foreign)}")
        for name, path in self._files.items():
            # per tensor: pages that were read stay mapped while it is open
            with safe_open(path, framework="pt") as file:
                weight, (a, b) = file.get_tensor(name), adapter_names(name)
            if a in adapters:
                weight = merged(weight, adapters[a], adapters[b], self._scale)
            yield packed({name: weight}, self._dtypes[name])
