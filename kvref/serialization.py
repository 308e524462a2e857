"""Saving caches to files and loading them (chapter MOVE).

Loading reads the file into new memory, and replaces the old contents of the cache only after the checksum matches. A damaged file
thus changes nothing (MOVE-03).

A file has the format safetensors:

    8 bytes: the length of the header | the header, JSON | tensors, one per layer and field, in the order of tokens | the checksum

Codes, scales and zeros are written bit for bit, without quantizing them again, in dtypes that are the same on every backend. In
the header, `__metadata__` contains the format ("kvref"), the version, the kind of cache, the sizes and formats that a loading
cache must have too, and the counters. The last tensor is the CRC-32 of all bytes before it.
"""

import io
import json
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from threading import Thread
from typing import Any, BinaryIO, ClassVar, Self, TypeAlias

import numpy as np

from kvref.array import ITEM_BYTES, Array
from kvref.backend import Backend
from kvref.errors import ConfigError, DtypeMismatch, FileDamaged, ShapeMismatch
from kvref.snapshot import CHUNK_BYTES, Bits, Contents, SavedState, TokenSpan, counter, from_bits, to_bits

try:
    from zlib_ng.zlib_ng import crc32  # the same checksum in a third of the time; pip install kvref[files]
except ImportError:
    from zlib import crc32

VERSION = 1  # of the file format; others are rejected
LONGEST_HEADER = 100_000_000  # bytes, as in safetensors
CHECKSUM = "checksum"
LARGE = 2**18  # from this number of bytes on, a chunk is summed in a thread
CRC_BYTES = 4
NAMES = {
    "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int8": "I8", "uint8": "U8", "uint16": "U16", "int32": "I32",
}  # fmt: skip
Entries: TypeAlias = dict[str, dict[str, Any]]  # tensors of a header: dtype, shape and data_offsets, by name


class Serializable(ABC):
    """Base class of caches that are saved and loaded as a whole (chapter MOVE).

    A subclass describes its contents as spans of slots (`contents`), and allocates room for described contents in a new cache
    (`_allocate_for`). This class writes and reads the bytes. `load` fills a new cache, and takes over its attributes
    (`_saved_attributes`) after the checksum matched: a load that fails changes nothing.
    """

    _backend: Backend
    _saved_attributes: ClassVar[tuple[str, ...]]  # the attributes that contain what is saved

    def save(self) -> Array:
        """Return the contents of the cache as the bytes of a file: uint8 [n] (MOVE-01).

        `kvref.save` writes a file in chunks, without a copy of everything in memory.
        """
        return as_array(self.contents(), self._backend)

    def load(self, data: Array) -> None:
        """Replace the contents of the cache by saved ones. data: uint8 [n], as `save` returned it (MOVE-01).

        Raises FileDamaged; ConfigError if the sizes or formats differ (MOVE-02); CapacityExceeded if there is no room;
        ShapeMismatch or DtypeMismatch for `data`. If it raises, nothing has changed (MOVE-03).
        """
        self.receive(open_bytes(data, self._backend))

    def receive(self, file: BinaryIO) -> None:
        """`load` from an open binary file. Used by `kvref.load`."""
        new = self._new_cache()  # its contents replace those of this one after the checksum matched
        empty = new.contents()
        saved_file = SavedFile(file, empty.kind, empty.shape)
        saved_file.read_into(new._allocate_for(saved_file.saved), self._backend)
        for name in self._saved_attributes:
            setattr(self, name, getattr(new, name))

    @abstractmethod
    def _new_cache(self) -> Self:
        """A new cache of the same configuration."""

    @abstractmethod
    def contents(self) -> Contents:
        """Describe what `save` writes."""

    @abstractmethod
    def _allocate_for(self, saved: SavedState) -> Sequence[TokenSpan]:
        """Set the counters of a new cache to saved ones, and return its spans. Raises FileDamaged or CapacityExceeded."""


def save(cache: Any, path: str | os.PathLike[str], *which: Any, **part: Any) -> None:
    """Save a cache, or one sequence of it, to a file. The cache does not change (MOVE-04).

    which: for paged and recurrent caches the sequence. part: `layers`, `tokens` and `heads`, as in `PagedCache.save`, or `layers`
    and `heads`, as in `RecurrentCache.save`. An existing file is replaced only after the new one is complete on the disk; if
    saving fails, it stays as it was.

    Raises OSError, and for a sequence or a part as the method `save` does.
    """
    path, contents = Path(path), cache.contents(*which, **part)
    temporary = path.with_name(f".kvref-{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb") as file:
            write(contents, file, cache._backend)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    _fsync_directory(path.parent)


def load(cache: Any, path: str | os.PathLike[str], *which: Any) -> None:
    """Load a file into a cache, or into one sequence of it, and replace what was there (MOVE-01).

    which: for paged and recurrent caches the sequence.

    Raises OSError; FileDamaged; ConfigError if the sizes, the formats or the file's version differ (MOVE-02); CapacityExceeded or
    OutOfBlocks if there is no room; SequenceNotFound. If it raises, nothing has changed (MOVE-03).
    """
    with open(path, "rb") as file:
        cache.receive(file, *which)


def as_array(contents: Contents, backend: Backend) -> Array:
    """Return the bytes of a file with these contents: uint8 [n]."""
    out = io.BytesIO()
    write(contents, out, backend)
    return backend.asarray(np.frombuffer(out.getvalue(), np.uint8).copy())


def open_bytes(data: Array, backend: Backend) -> BinaryIO:
    """Return bytes, or an array uint8 [n], as an open binary file. Raises ShapeMismatch or DtypeMismatch."""
    if not isinstance(data, bytes | bytearray | memoryview):
        if not hasattr(data, "shape"):
            raise DtypeMismatch(f"data: expected an array of uint8, got {type(data).__name__}")
        ShapeMismatch.check("data", tuple(data.shape), ("n",))
        data = data if isinstance(data, np.ndarray) else backend.to_numpy(data)
        if data.dtype != np.uint8:
            raise DtypeMismatch(f"data: expected uint8, got {data.dtype}")
        data = np.ascontiguousarray(data).tobytes()
    return io.BytesIO(data)


def write(contents: Contents, file: BinaryIO, backend: Backend) -> None:
    """Write contents to an open binary file, in chunks: at most about 2 * CHUNK_BYTES are in memory at a time."""
    checksum = Checksum()

    def out(part: bytes | memoryview) -> None:
        checksum.update(part)
        file.write(part)

    metadata = {"format": "kvref", "version": str(VERSION), "kind": contents.kind}
    metadata |= {"shape": _to_json(contents.shape), "state": _to_json(contents.state)}
    header = _to_json({"__metadata__": metadata, **_header_entries(contents.spans)}).encode()
    header += b" " * (-len(header) % 8)
    out(len(header).to_bytes(8, "little"))
    out(header)
    for span in contents.spans:
        for name, shape, dtype in span.fields():
            for slots in span.chunks(ITEM_BYTES[dtype] * prod(shape)):
                out(to_bits(span.get(name, slots), backend).data)
    file.write(checksum.digest())


class SavedFile:
    """An open file with a saved cache, which is read in two steps: the header, then the tensors.

    Between the steps, the caller allocates memory for what the header describes (`saved`). This memory must not be in use before
    `read_into` has returned, because the file can be damaged: the checksum is compared last.
    """

    def __init__(self, file: BinaryIO, kind: str, shape: Mapping[str, int | float | str]) -> None:
        """Read the header. kind, shape: those of the loading cache, which the file must have too.

        Raises FileDamaged or ConfigError.
        """
        self._file, self._checksum = file, Checksum()
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        self._entries, metadata = _read_header(self._take, size)
        if metadata["kind"] != kind:
            raise ConfigError(f"file: expected a saved {kind} cache, got a saved {metadata['kind']} cache")
        theirs, state = _parse_object(metadata["shape"], "shape"), _parse_object(metadata["state"], "state")
        if theirs != dict(shape):
            raise ConfigError(f"file: expected data of a cache with {dict(shape)}, got {theirs}")
        self.saved = SavedState(state, {name: entry["shape"][0] for name, entry in self._entries.items()})

    def read_into(self, spans: Sequence[TokenSpan], backend: Backend) -> None:
        """Read all tensors into the slots of these spans, and compare the checksum. Raises FileDamaged."""
        if _header_entries(spans) != self._entries:
            raise FileDamaged("file: its tensors do not match its counters")
        for span in spans:
            dtypes = span.store.dtypes
            for name, token, dtype in span.fields():
                token_bytes = ITEM_BYTES[dtype] * prod(token)
                for slots in span.chunks(token_bytes):
                    bits = self._take(len(slots) * token_bytes)
                    span.put(name, slots, from_bits(bits, (len(slots), *token), dtypes[name], backend), backend)
        wanted = self._checksum.digest()
        if self._file.read() != wanted:
            raise FileDamaged("file: the checksum does not match the contents")

    def _take(self, count: int) -> Bits:
        """The next `count` bytes, which the checksum includes. Raises FileDamaged at the end of the file."""
        part = np.empty(count, np.uint8)  # fresh memory, because an array library can keep a reference to it
        if self._file.readinto(part.data) != count:  # type: ignore[attr-defined]  # every binary file has readinto
            raise FileDamaged(f"file: expected {count} more bytes, got the end of the file")
        self._checksum.update(part.data)
        return part


def verify(file: BinaryIO) -> None:
    """Compare the checksum of a file, and read nothing else. Raises FileDamaged."""
    left, checksum = file.seek(0, io.SEEK_END) - CRC_BYTES, Checksum()
    file.seek(0)
    while left > 0 and (part := file.read(min(left, CHUNK_BYTES))):
        checksum.update(part)
        left -= len(part)
    if left or file.read() != checksum.digest():
        raise FileDamaged("file: the checksum does not match the contents")


class Checksum:
    """A CRC-32 over successive chunks, as in gzip. Large chunks are summed in a thread, while the caller reads or writes.

    It detects damage by disks and networks. A cryptographic hash would also detect deliberate changes, but can be slower than the
    disk.
    """

    def __init__(self) -> None:
        self._sum, self._thread = 0, Thread()

    def update(self, part: bytes | memoryview) -> None:
        """Add a chunk. It must not change until the next call of a method."""
        self._wait()
        if len(part) < LARGE:  # summed before a thread would have started
            self._add(part)
        else:
            self._thread = Thread(target=self._add, args=(part,))
            self._thread.start()

    def digest(self) -> bytes:
        """Return the checksum, 4 bytes, little-endian."""
        self._wait()
        return self._sum.to_bytes(CRC_BYTES, "little")

    def _add(self, part: bytes | memoryview) -> None:
        self._sum = crc32(part, self._sum)

    def _wait(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()


def _read_header(take: Callable[[int], Bits], size: int) -> tuple[Entries, dict[str, str]]:
    """The tensors and the metadata of a file of `size` bytes, checked for consistency. Raises FileDamaged or ConfigError."""
    length = int.from_bytes(take(8).tobytes(), "little")
    if length > min(size - 8, LONGEST_HEADER):
        raise FileDamaged(f"file: expected a header that ends within its {size} bytes, got one of {length}")
    entries = _parse_object(take(length).tobytes().decode("utf-8", "replace"), "header")
    metadata = entries.pop("__metadata__", None)
    if not isinstance(metadata, dict) or metadata.get("format") != "kvref":
        raise FileDamaged("file: not written by kvref")
    if (version := str(metadata.get("version"))) != str(VERSION):
        raise ConfigError(f"file: expected version {VERSION}, got {version[:20]!r}")
    if not all(isinstance(metadata.get(name), str) for name in ("kind", "shape", "state")):
        raise FileDamaged("file: its header lacks the kind, shape or state")
    at, dtypes = 0, {short: ITEM_BYTES[name] for name, short in NAMES.items()}
    for name, entry in entries.items():
        shape = entry.get("shape") if isinstance(entry, dict) else None
        if not isinstance(shape, list) or not shape or entry.get("dtype") not in dtypes:
            raise FileDamaged(f"file: {name[:40]}: expected a tensor, got {str(entry)[:60]}")
        end = at + dtypes[entry["dtype"]] * prod(counter(each, "shape") for each in shape)
        if entry != {"dtype": entry["dtype"], "shape": shape, "data_offsets": [at, end]}:
            raise FileDamaged(f"file: {name[:40]}: expected data_offsets {[at, end]} and no other fields, got {str(entry)[:60]}")
        at = end
    if at + 8 + length != size or not entries or list(entries)[-1] != CHECKSUM:
        raise FileDamaged(f"file: expected {at + 8 + length} bytes that end with a checksum, got {size}")
    return entries, metadata


def _header_entries(spans: Sequence[TokenSpan]) -> Entries:
    """The header's entries for these tensors and the checksum, in the order of the file."""
    found, at = Entries(), 0

    def add(name: str, dtype: str, shape: Sequence[int]) -> None:
        nonlocal at
        end = at + ITEM_BYTES[dtype] * prod(shape)
        found[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end

    for span in spans:
        for name, token, dtype in span.fields():
            add(f"{span.name}.{name}", dtype, (len(span.slots), *token))
    add(CHECKSUM, "uint8", (CRC_BYTES,))
    return found


def _to_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=False)


def _parse_object(text: str, what: str) -> dict[str, Any]:
    """A JSON object. Raises FileDamaged."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise FileDamaged(f"file: expected a {what} in JSON, got {text[:40]!r}") from None
    if not isinstance(found, dict):
        raise FileDamaged(f"file: expected a {what} in JSON, got {text[:40]!r}")
    return found


def _fsync_directory(folder: Path) -> None:
    """Write a folder's entries to the disk, so that a rename survives a crash. Not possible on Windows."""
    with suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
