"""The cost of saving and loading a cache, compared with writing and reading a file of the same size.

`python -m kvref_bench.save_load`. Each round writes a plain file to the disk (fsync) and saves the cache, then reads
the saved file plainly and loads it. Before each read the page cache is emptied of the file (posix_fadvise). The file is read once
before the timed reads, because the first read of new data is slower for any reader. Memory use is reported on Linux only.
"""

import argparse
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter

import numpy as np

import kvref
from kvref.snapshot import CHUNK_BYTES
from kvref_bench.comparison import describe_machine

LAYERS, HEADS, DIM, BLOCK = 8, 8, 128, 16
TOKENS_AT_ONCE = 512
ROUNDS = 5


def filled_cache(backend: kvref.Backend, dtype: str, tokens: int) -> tuple[kvref.PagedCache, int]:
    """Return a cache with one sequence of `tokens` tokens, and room for as many more."""
    cache = empty_cache(backend, dtype, tokens)
    sequence, rng = cache.create(), np.random.default_rng(0)
    for start in range(0, tokens, TOKENS_AT_ONCE):
        rows = backend.asarray(rng.standard_normal((min(TOKENS_AT_ONCE, tokens - start), HEADS, DIM), np.float32))
        for layer in range(LAYERS):
            cache.write(sequence, layer, start, rows, rows)
    return cache, sequence


def empty_cache(backend: kvref.Backend, dtype: str, tokens: int) -> kvref.PagedCache:
    blocks = LAYERS * -(-tokens // BLOCK)
    return kvref.PagedCache(kvref.PagedConfig(blocks, LAYERS, HEADS, DIM, BLOCK, dtype), backend)


def write_raw(path: Path, size: int) -> None:
    piece = np.random.default_rng(0).bytes(CHUNK_BYTES)
    with open(path, "wb") as file:
        for start in range(0, size, CHUNK_BYTES):
            file.write(piece[: size - start])
        file.flush()
        os.fsync(file.fileno())


def read_raw(path: Path) -> None:
    into = memoryview(bytearray(CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while file.readinto(into):
            pass


def drop_page_cache(path: Path) -> None:
    """Remove a file from the page cache of the system."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def run_seconds(run: Callable[[], object]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start


def record_seconds(into: list[float], run: Callable[[], object]) -> None:
    into.append(run_seconds(run))


def peak_memory(run: Callable[[], object]) -> int | None:
    """Return the peak memory of the process during `run` minus that before, in bytes; None if unknown."""
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not reset.exists():
        return None
    reset.write_text("5")  # reset the peak to the present use
    before = _kilobytes(status, "VmRSS")
    run()
    return 1024 * (_kilobytes(status, "VmHWM") - before)


def _kilobytes(status: Path, name: str) -> int:
    return next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith(f"{name}:"))


def measure(backend: kvref.Backend, dtype: str, size: int, folder: Path) -> list[str]:
    """Return the report as lines."""
    tokens = size // (2 * LAYERS * HEADS * DIM * (4 if dtype == "float32" else 2))
    cache, sequence = filled_cache(backend, dtype, tokens)
    saved, plain = folder / "saved.safetensors", folder / "plain"
    taken = peak_memory(lambda: kvref.save(cache, saved, sequence))
    size = saved.stat().st_size
    saved.unlink()
    other = empty_cache(backend, dtype, tokens)  # its memory is mapped from the second round on, like that of a cache in use
    times: dict[str, list[float]] = {name: [] for name in ("write", "save", "read", "load")}
    loaded: int | None = None
    for _ in range(ROUNDS):
        times["write"].append(run_seconds(lambda: write_raw(plain, size)))
        times["save"].append(run_seconds(lambda: kvref.save(cache, saved, sequence)))
        for into in ([], times["read"]):
            drop_page_cache(saved)
            record_seconds(into, lambda: read_raw(saved))
        drop_page_cache(saved)
        begun = other.create()
        extra = peak_memory(partial(record_seconds, times["load"], partial(kvref.load, other, saved, begun)))
        loaded = extra if loaded is None or extra is None else max(loaded, extra)
        other.drop(begun)
        for path in (plain, saved):  # the next round writes new ones too
            path.unlink()
    lines = [f"{backend.name}, {dtype}, {size / 2**20:.0f} MiB, {tokens} tokens in {LAYERS} layers; median of {ROUNDS} rounds"]
    for name, disk in (("save", "write"), ("load", "read")):
        ours, theirs = median(times[name]), median(times[disk])
        ratio = median(b / a for a, b in zip(times[name], times[disk], strict=True))
        lines.append(
            f"{name} {size / ours / 1e9:.2f} GB/s, plain {disk} {size / theirs / 1e9:.2f} GB/s: {ratio:.2f} of its speed"
        )
    if taken is not None and loaded is not None:
        lines.append(
            f"memory: save {taken / 2**20:.0f} MiB, load {(loaded - size) / 2**20:.0f} MiB in addition to the loaded cache"
        )
    return lines


def main() -> None:
    options = argparse.ArgumentParser(description="measure the cost of saving and loading a cache")
    options.add_argument("--backend", default="numpy")
    options.add_argument("--dtype", default="float16", choices=("float32", "float16", "bfloat16"))
    options.add_argument("--megabytes", type=int, default=1024)
    options.add_argument("--folder", default=".", help="folder on the disk to measure")
    asked = options.parse_args()
    about = describe_machine()
    print(f"{about['processor']}, {about['cores']} cores, Python {about['python']}")
    with TemporaryDirectory(dir=asked.folder) as folder:
        print(*measure(kvref.backend(asked.backend), asked.dtype, asked.megabytes * 2**20, Path(folder)), sep="\n")


if __name__ == "__main__":
    main()
