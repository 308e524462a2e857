"""What a cache holds, as a file: written as it lies there, and read beside what is there, which goes once all of it is right.

A file is one of safetensors', which anybody can open:

    8 bytes: how long the header is | the header, JSON | a tensor for all that some slots hold, in order of tokens | the checksum

Nothing is quantized again: codes, scales and zeros lie in it bit for bit as they lie in the slots, in dtypes that are the same on
every backend. The header says in `__metadata__` what wrote it, in which version, which kind of cache, the sizes and formats that
another has to have in common with it, and its counters. The last tensor is the CRC-32 of every byte before it (MOVE-03).
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
from kvref.contents import PIECE, Bits, Contents, Saved, Stretch, counter, from_bits, to_bits
from kvref.errors import ConfigError, DtypeMismatch, FileDamaged, ShapeMismatch

try:
    from zlib_ng.zlib_ng import crc32  # the same sum, in a third of the time: kvref[files]
except ImportError:
    from zlib import crc32

VERSION = 1  # of the file: a reader takes this one alone
LONGEST_HEADER = 100_000_000  # bytes, as in safetensors
CHECKSUM = "checksum"
LARGE = 2**18  # bytes of a part that a thread sums
CRC_BYTES = 4
NAMES = {
    "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int8": "I8", "uint8": "U8", "uint16": "U16", "int32": "I32",
}  # fmt: skip
Entries: TypeAlias = dict[str, dict[str, Any]]  # of a header: dtype, shape and data_offsets, by name


class Movable(ABC):
    """A cache that is saved and loaded as a whole."""

    _backend: Backend
    _moved: ClassVar[tuple[str, ...]]  # its attributes that hold what is moved

    def save(self) -> Array:
        """What it holds, as a file's bytes, uint8 [n] (MOVE-01); `kvref.save` writes the file itself."""
        return as_array(self.contents(), self._backend)

    def load(self, data: Array) -> None:
        """Hold what was saved, uint8 [n], in place of what it holds.

        Raises FileDamaged, ConfigError, or CapacityExceeded where there is no room for it; then nothing has changed (MOVE-03).
        """
        self.receive(opened(data, self._backend))

    def receive(self, file: BinaryIO) -> None:
        """`load` of a file that is open."""
        new = self._another()  # which takes this one's place once the whole file was right
        empty = new.contents()
        read(file, empty.kind, empty.shape, new._make_room, self._backend)
        for name in self._moved:
            setattr(self, name, getattr(new, name))

    @abstractmethod
    def _another(self) -> Self:
        """A new cache of the same configuration."""

    @abstractmethod
    def contents(self) -> Contents:
        """What is saved."""

    @abstractmethod
    def _make_room(self, saved: Saved) -> Sequence[Stretch]:
        """Of a new cache: count what was saved, and say where it goes. Raises FileDamaged or CapacityExceeded."""


def save(cache: Any, path: str | os.PathLike[str], *which: Any, **part: Any) -> None:
    """Save a cache, or `which` of its sequences and what part of it, as a file. It has no effect on the cache (MOVE-04).

    A file that is there is replaced once the new one is on the disk as a whole: whatever happens on the way leaves the old one.
    Raises OSError, and what naming a sequence or a part may raise.
    """
    path, contents = Path(path), cache.contents(*which, **part)
    beside = path.with_name(f".kvref-{secrets.token_hex(8)}")
    try:
        with open(beside, "xb") as file:
            write(contents, file, cache._backend)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise
    _settle(path.parent)


def load(cache: Any, path: str | os.PathLike[str], *which: Any) -> None:
    """Load what was saved into a cache, or into `which` of its sequences: it takes the place of what was there.

    Raises OSError, FileDamaged, ConfigError for a file of other sizes or formats, or of another version, and CapacityExceeded or
    OutOfBlocks where there is no room for it beside what is there; then nothing has changed (MOVE-03).
    """
    with open(path, "rb") as file:
        cache.receive(file, *which)


def as_array(contents: Contents, backend: Backend) -> Array:
    """What `save` writes as uint8 [n]."""
    out = io.BytesIO()
    write(contents, out, backend)
    return backend.asarray(np.frombuffer(out.getvalue(), np.uint8).copy())


def opened(data: Array, backend: Backend) -> BinaryIO:
    """uint8 [n] as the file that it is. Raises ShapeMismatch or DtypeMismatch."""
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
    """Piece by piece: no more than two times PIECE bytes are held at a time."""
    checksum = Checksum()

    def out(part: bytes | memoryview) -> None:
        checksum.update(part)
        file.write(part)

    said = {"format": "kvref", "version": str(VERSION), "kind": contents.kind}
    said |= {"shape": _json(contents.shape), "state": _json(contents.state)}
    header = _json({"__metadata__": said, **_entries(contents.stretches)}).encode()
    header += b" " * (-len(header) % 8)
    out(len(header).to_bytes(8, "little"))
    out(header)
    for stretch in contents.stretches:
        for name, shape, dtype in stretch.fields():
            for slots in stretch.pieces(ITEM_BYTES[dtype] * prod(shape)):
                out(to_bits(stretch.take(name, slots), backend).data)
    file.write(checksum.digest())


def read(
    file: BinaryIO,
    kind: str,
    shape: Mapping[str, int | float | str],
    place: Callable[[Saved], Sequence[Stretch]],
    backend: Backend,
) -> None:
    """Read a file of this kind and shape into where `place` says, which must be nowhere that anybody reads yet.

    Raises FileDamaged or ConfigError, and what `place` does.
    """
    checksum = Checksum()

    def take(count: int) -> Bits:
        part = np.empty(count, np.uint8)  # fresh memory: a library may keep it
        if file.readinto(part.data) != count:  # type: ignore[attr-defined]  # every binary file has it
            raise FileDamaged(f"file: expected {count} bytes more, got the end of the file")
        checksum.update(part.data)
        return part

    size = file.seek(0, io.SEEK_END)
    file.seek(0)
    entries, said = _header(take, size)
    if said["kind"] != kind:
        raise ConfigError(f"file: expected one of a {kind} cache, got one of a {said['kind']} cache")
    theirs, state = _object(said["shape"], "shape"), _object(said["state"], "state")
    if theirs != dict(shape):
        raise ConfigError(f"file: expected what was saved of {dict(shape)}, got {theirs}")
    counts = {name: entry["shape"][0] for name, entry in entries.items()}
    stretches = place(Saved(state, counts))
    if _entries(stretches) != entries:
        raise FileDamaged("file: its tensors do not match its counters")
    for stretch in stretches:
        parts = stretch.store.dtypes
        for name, token, dtype in stretch.fields():
            token_bytes = ITEM_BYTES[dtype] * prod(token)
            for slots in stretch.pieces(token_bytes):
                bits = take(len(slots) * token_bytes)
                stretch.put(name, slots, from_bits(bits, (len(slots), *token), parts[name], backend), backend)
    wanted = checksum.digest()
    if file.read() != wanted:
        raise FileDamaged("file: the checksum does not match the contents")


def verify(file: BinaryIO) -> None:
    """Read a file for its checksum alone. Raises FileDamaged."""
    left, checksum = file.seek(0, io.SEEK_END) - CRC_BYTES, Checksum()
    file.seek(0)
    while left > 0 and (part := file.read(min(left, PIECE))):
        checksum.update(part)
        left -= len(part)
    if left or file.read() != checksum.digest():
        raise FileDamaged("file: the checksum does not match the contents")


class Checksum:
    """CRC-32 of one part after the other, as gzip has it, the large ones beside what goes on: it takes as long as the disk does.

    It is there for what disks and networks do to a file, and keeps up with them on one core where a cryptographic hash may not.
    """

    def __init__(self) -> None:
        self._sum, self._thread = 0, Thread()

    def update(self, part: bytes | memoryview) -> None:
        """`part` must not change until the next call."""
        self._wait()
        if len(part) < LARGE:  # done before a thread were there
            self._add(part)
        else:
            self._thread = Thread(target=self._add, args=(part,))
            self._thread.start()

    def digest(self) -> bytes:
        """Little-endian."""
        self._wait()
        return self._sum.to_bytes(CRC_BYTES, "little")

    def _add(self, part: bytes | memoryview) -> None:
        self._sum = crc32(part, self._sum)

    def _wait(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()


def _header(take: Callable[[int], Bits], size: int) -> tuple[Entries, dict[str, str]]:
    """The tensors and the metadata of a file of `size` bytes, which fit each other. Raises FileDamaged or ConfigError."""
    length = int.from_bytes(take(8).tobytes(), "little")
    if length > min(size - 8, LONGEST_HEADER):
        raise FileDamaged(f"file: expected a header that ends within its {size} bytes, got one of {length}")
    entries = _object(take(length).tobytes().decode("utf-8", "replace"), "header")
    said = entries.pop("__metadata__", None)
    if not isinstance(said, dict) or said.get("format") != "kvref":
        raise FileDamaged("file: not written by kvref")
    if (version := str(said.get("version"))) != str(VERSION):
        raise ConfigError(f"file: expected version {VERSION}, got {version[:20]!r}")
    if not all(isinstance(said.get(name), str) for name in ("kind", "shape", "state")):
        raise FileDamaged("file: its header lacks the kind, shape or state")
    at, dtypes = 0, {short: ITEM_BYTES[name] for name, short in NAMES.items()}
    for name, entry in entries.items():
        shape = entry.get("shape") if isinstance(entry, dict) else None
        if not isinstance(shape, list) or not shape or entry.get("dtype") not in dtypes:
            raise FileDamaged(f"file: {name[:40]}: expected a tensor, got {str(entry)[:60]}")
        end = at + dtypes[entry["dtype"]] * prod(counter(each, "shape") for each in shape)
        if entry != {"dtype": entry["dtype"], "shape": shape, "data_offsets": [at, end]}:
            raise FileDamaged(f"file: {name[:40]}: expected it at {[at, end]}, got {str(entry)[:60]}")
        at = end
    if at + 8 + length != size or not entries or list(entries)[-1] != CHECKSUM:
        raise FileDamaged(f"file: expected {at + 8 + length} bytes that end with a checksum, got {size}")
    return entries, said


def _entries(stretches: Sequence[Stretch]) -> Entries:
    """What a header says of the tensors, the checksum last."""
    found, at = Entries(), 0

    def add(name: str, dtype: str, shape: Sequence[int]) -> None:
        nonlocal at
        end = at + ITEM_BYTES[dtype] * prod(shape)
        found[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end

    for stretch in stretches:
        for name, token, dtype in stretch.fields():
            add(f"{stretch.name}.{name}", dtype, (len(stretch.slots), *token))
    add(CHECKSUM, "uint8", (CRC_BYTES,))
    return found


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=False)


def _object(text: str, what: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise FileDamaged(f"file: expected a {what} in JSON, got {text[:40]!r}") from None
    if not isinstance(found, dict):
        raise FileDamaged(f"file: expected a {what} in JSON, got {text[:40]!r}")
    return found


def _settle(folder: Path) -> None:
    """Let the name of a file be on the disk too, where folders can be opened."""
    with suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)
