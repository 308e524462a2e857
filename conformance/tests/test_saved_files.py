"""Saved caches as others read them: the safetensors package, another process, and a load of a damaged file."""

import json
import subprocess
import sys
import tracemalloc
import zlib
from fractions import Fraction
from threading import Thread

import numpy as np
import pytest
from safetensors.numpy import load_file

import kvref
from kvref import serialization
from kvref.errors import ConfigError, DtypeMismatch, FileDamaged, PositionOutOfRange
from kvref.snapshot import CHUNK_BYTES

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

    monkeypatch.setattr(serialization, "write", full)
    with pytest.raises(OSError, match="No space"):
        kvref.save(quantized(2), tmp_path / "file")
    assert [each.name for each in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == before


def test_no_second_copy_is_held(tmp_path):
    sizes = {"capacity": 8192, "num_kv_heads": 8, "head_dim": 128, "format": "int8"}  # 16 MiB of codes
    cache, other = (quantized(tokens, kvref.backend("numpy"), **sizes) for tokens in (8192, 1))
    chunks = 3 * CHUNK_BYTES  # one read or written, one checksummed, one on its way to the slots
    for most, move in (
        (chunks, lambda: kvref.save(cache, tmp_path / "file")),
        # old contents stay until the whole file was read
        (chunks + other.memory_bytes, lambda: kvref.load(other, tmp_path / "file")),
    ):
        tracemalloc.start()
        move()
        _, held = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert held < most


@pytest.mark.parametrize("place", [0.3, 0.9])
def test_a_large_file_is_summed_as_a_small_one_is(place):
    sizes = {"capacity": 1024, "num_kv_heads": 8, "head_dim": 128, "format": "int8"}  # chunks that a thread checksums
    file, other = np.asarray(quantized(1024, **sizes).save()), quantized(1, **sizes)
    file[int(place * len(file))] ^= 1
    with pytest.raises(FileDamaged):
        other.load(file)
    assert other.length(0) == 1


def made_by_hand(file, **state):
    """A file whose header contains other counts, with a valid checksum."""
    content = bytes(np.asarray(file))
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    said = json.loads(header["__metadata__"]["state"]) | state
    header["__metadata__"]["state"] = json.dumps(said)
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + content[end:-4]
    return np.frombuffer(content + zlib.crc32(content).to_bytes(4, "little"), np.uint8)


def test_the_checksum_is_gzips():
    file, empty = quantized(3).save(), quantized(1)
    empty.load(made_by_hand(file))  # its checksum was computed here
    assert empty.length() == 3


def test_no_room_is_made_for_what_a_file_cannot_have():
    cache, sequence = paged(tokens=0)
    for far in (2**31 + 1, 2**40, 2**62):
        with pytest.raises(FileDamaged, match="first: expected a count of at most"):
            cache.load(sequence, made_by_hand(cache.save(sequence), first=far, lengths=[far] * 2, tokens=[0, far]))
    tiered = kvref.TieredCache(kvref.TieredConfig(num_kv_heads=1, head_dim=2, max_tokens=8, tail_length=2))
    tiers = {"tail": [["float16", 0, 0, 0]], "warm": [], "store": [["q4", 8, 0, 0]]}
    with pytest.raises(FileDamaged, match="expected a run capacity of at least 1"):
        tiered.load(made_by_hand(tiered.save(), tiers=tiers))


@pytest.mark.parametrize("scale", [np.float32(0.1), Fraction(1, 10), 0.1])
def test_any_number_may_be_a_scale_of_what_is_saved(scale):
    sizes = {"num_layers": 1, "capacity": 4, "num_kv_heads": 1, "head_dim": 2, "format": "float8_e4m3fn_static"}
    cache, other = (quantized(count, **sizes, key_scale=each) for count, each in ((3, scale), (1, 0.1)))
    other.load(cache.save())
    assert other.length() == 3
    with pytest.raises(ConfigError, match=r"'key_scale': 1\.0"):
        quantized(1, **sizes).load(cache.save())


def test_what_is_no_span_and_no_file_is_said_to_be_none():
    cache, sequence = paged()
    for span in (3, slice(0, 1), [0]):
        with pytest.raises(PositionOutOfRange, match=r"tokens: expected \[start, stop\], got "):
            cache.save(sequence, tokens=span)
    assert bytes(cache.save(sequence, tokens=np.array([0, 2]))) == bytes(cache.save(sequence, tokens=[0, 2]))
    for data in (None, [1, 2]):
        with pytest.raises(DtypeMismatch, match="data: expected an array of uint8, got "):
            cache.load(sequence, data)


def test_keys_may_come_one_by_one():
    store = kvref.HostStore(2)
    assert store.prepare_store(key for key in (1, 2)) == ([1, 2], [])
    assert store.num_free == 0


def test_free_places_are_counted_between_calls():
    store, seen = kvref.HostStore(1), []
    with store._lock:  # another thread is inside a call
        looking = Thread(target=lambda: seen.append(store.num_free))
        looking.start()
        looking.join(0.2)
        assert not seen
    looking.join()
    assert seen == [1]
