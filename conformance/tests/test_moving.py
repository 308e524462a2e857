"""Files of caches, by what others read in them: the safetensors package, another process, and whoever finds them damaged."""

import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from safetensors.numpy import load_file

import kvref
from kvref import transfer
from kvref.contents import PIECE
from kvref.errors import ConfigError, FileDamaged

READ = """
import sys, numpy as np, kvref
config = kvref.PagedConfig(9, num_layers=2, num_kv_heads=2, head_dim=32, block_size=7, dtype=sys.argv[2])
cache = kvref.PagedCache(config)
sequence = cache.create()
kvref.load(cache, sys.argv[1], sequence)
for layer in range(2):
    print(*(part.tobytes().hex() for part in cache.gather(sequence, layer)))
"""


def paged(dtype="float16", tokens=5, blocks=8):
    cache = kvref.PagedCache(kvref.PagedConfig(blocks, 2, 2, 32, block_size=4, dtype=dtype))
    sequence, rng = cache.create(), np.random.default_rng(3)
    for layer in range(2):
        cache.write(sequence, layer, 0, *rng.normal(size=(2, tokens, 2, 32)).astype(np.float32))
    return cache, sequence


def quantized(tokens, backend=kvref.reference, **sizes):
    sizes = {"num_layers": 1, "capacity": 4, "num_kv_heads": 1, "head_dim": 2} | sizes
    cache = kvref.QuantizedCache(kvref.QuantizedConfig(**sizes), backend)
    rows = np.random.default_rng(tokens).normal(size=(2, tokens, sizes["num_kv_heads"], sizes["head_dim"]))
    cache.append(0, *rows.astype(np.float32))
    return cache


def test_safetensors_reads_what_is_saved(tmp_path):
    cache, sequence = paged()
    kvref.save(cache, tmp_path / "file", sequence)
    tensors = load_file(tmp_path / "file")
    for layer in range(2):
        for name, part in zip(("keys", "values"), cache.gather(sequence, layer), strict=True):
            held = tensors[f"layers.{layer}.{name}.codes"]
            assert held.dtype == np.float16
            assert np.array_equal(held, part)


@pytest.mark.parametrize("dtype", ["float16", "int8", "q4", "q8_0", "uint4_g32_bfloat16", "nvfp4"])
def test_another_process_reads_the_same_bits(dtype, tmp_path):
    cache, sequence = paged(dtype)
    kvref.save(cache, tmp_path / "file", sequence)
    said = subprocess.run([sys.executable, "-c", READ, tmp_path / "file", dtype], capture_output=True, text=True, check=True)
    want = [" ".join(part.tobytes().hex() for part in cache.gather(sequence, layer)) for layer in range(2)]
    assert said.stdout.splitlines() == want


def test_every_byte_that_is_wrong_and_every_end_that_is_missing_is_noticed():
    file, cache = np.asarray(quantized(3).save()), quantized(2)
    before = [part.tobytes() for part in cache.read_tokens(0, range(2))]
    damaged = [file[:end] for end in range(len(file))]
    for place in range(len(file)):
        damaged.append(file.copy())
        damaged[-1][place] ^= 1 << place % 8
    for each in damaged:
        with pytest.raises((FileDamaged, ConfigError)):
            cache.load(each)
    assert [part.tobytes() for part in cache.read_tokens(0, range(cache.length()))] == before


def test_a_save_that_fails_leaves_the_file_that_was_there(tmp_path, monkeypatch):
    kvref.save(quantized(3), tmp_path / "file")
    before = (tmp_path / "file").read_bytes()

    def full(contents, file, backend):
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(transfer, "write", full)
    with pytest.raises(OSError, match="No space"):
        kvref.save(quantized(2), tmp_path / "file")
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == before


def test_no_second_copy_is_held(tmp_path):
    sizes = {"capacity": 8192, "num_kv_heads": 8, "head_dim": 128, "format": "int8"}  # 16 MiB of codes
    cache, other = (quantized(tokens, kvref.backend("numpy"), **sizes) for tokens in (8192, 1))
    pieces = 3 * PIECE  # one that is read or written, one that is hashed, one on its way to the slots
    for most, move in (
        (pieces, lambda: kvref.save(cache, tmp_path / "file")),
        (pieces + other.memory_bytes, lambda: kvref.load(other, tmp_path / "file")),  # what was there stays until all has come
    ):
        tracemalloc.start()
        move()
        _, held = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert held < most


@pytest.mark.parametrize("place", [0.3, 0.9])
def test_a_large_file_is_hashed_as_a_small_one_is(place):
    sizes = {"capacity": 1024, "num_kv_heads": 8, "head_dim": 128, "format": "int8"}  # pieces that a thread hashes
    file, other = np.asarray(quantized(1024, **sizes).save()), quantized(1, **sizes)
    file[int(place * len(file))] ^= 1
    with pytest.raises(FileDamaged):
        other.load(file)
    assert other.length(0) == 1
