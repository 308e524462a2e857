"""Growth of the reference's costs: the time of n and of 4n operations, in processor time of one process.

A cost that is linear in n takes about 4 times as long, a quadratic one 16 times. `python -m kvref_bench.growth` prints the table.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvref import (
    ChannelCache,
    ChannelConfig,
    HostStore,
    PagedCache,
    PagedConfig,
    PooledCache,
    PooledConfig,
    PrefixCache,
    ShardedCache,
    ShardedConfig,
)

REPEATS = 3
FACTOR = 4
HEADS, DIM = 1, 8


def tokens(count: int) -> NDArray[np.float32]:
    return np.ones((count, HEADS, DIM), np.float32)


def paged_config(num_blocks: int) -> PagedConfig:
    return PagedConfig(num_blocks=num_blocks, block_size=4, num_layers=1, num_kv_heads=HEADS, head_dim=DIM)


def append_single_tokens(cache: PooledCache | ShardedCache, count: int) -> None:
    row = tokens(1)
    for _ in range(count):
        cache.append(row, row)


def commit_of_equal_prompts(count: int) -> Callable[[], object]:
    """`count` sequences with the same prompt of one block, each committed, then dropped and evicted."""
    cache, rows, prompt = PrefixCache(paged_config(count)), tokens(4), list(range(4))

    def run() -> None:
        for _ in range(count):
            sequence = cache.create()
            cache.write(sequence, 0, 0, rows, rows)
            cache.commit(sequence, prompt)
        for sequence in range(count):
            cache.drop(sequence)
        cache.ensure_capacity(cache.create(), 4 * count)

    return run


def load_of_parts(count: int) -> Callable[[], object]:
    """A sequence of `count` tokens, loaded in `count` parts."""
    cache, other = PagedCache(paged_config(count)), PagedCache(paged_config(count))
    source, target = cache.create(), other.create()
    cache.write(source, 0, 0, tokens(count), tokens(count))
    parts = [cache.save(source, tokens=[at, at + 1]) for at in range(count)]

    def run() -> None:
        for part in parts:
            other.load(target, part)

    return run


def append_to_a_pooled_cache(count: int) -> Callable[[], object]:
    """`count` appends of one token to buffers of 4 tokens."""
    config = PooledConfig(num_kv_heads=HEADS, head_dim=DIM, tokens_per_block=4, max_tokens=count)
    cache = PooledCache(config)
    return lambda: append_single_tokens(cache, count)


def read_of_one_quantized_token(count: int) -> Callable[[], object]:
    """`count` reads of one of `count` tokens that are quantized per channel."""
    cache = ChannelCache(ChannelConfig(num_kv_heads=HEADS, head_dim=32, max_tokens=count, residual=32))
    rows = np.ones((count, HEADS, 32), np.float32)
    cache.append(rows, rows)
    return lambda: [cache.read([at]) for at in range(count)]


def append_to_one_sequence_many_times(count: int) -> Callable[[], object]:
    """One append that names the same sequence `count` times."""
    cache, rows = PagedCache(paged_config(count)), tokens(count)
    sequence = cache.create()
    return lambda: cache.append([sequence] * count, 0, rows, rows)


def append_to_a_sharded_cache(count: int) -> Callable[[], object]:
    """`count` appends of one token on two ranks, in blocks of one token."""
    cache = ShardedCache(
        ShardedConfig(num_blocks=count, block_size=1, num_kv_heads=HEADS, head_dim=DIM, head_ranks=1, token_ranks=2)
    )
    return lambda: append_single_tokens(cache, count)


def store_beside_pinned_blocks(count: int) -> Callable[[], object]:
    """`count` evictions in a host store in which `count` blocks are pinned by loads."""
    store = HostStore(count + 1)
    pinned = list(range(count))
    store.prepare_store(pinned)
    store.complete_store(pinned)
    store.prepare_load(pinned)

    def run() -> None:
        for key in range(count, 2 * count):
            store.prepare_store([key])
            store.complete_store([key])

    return run


GROWING: dict[Callable[[int], Callable[[], object]], int] = {
    commit_of_equal_prompts: 500,
    load_of_parts: 250,
    append_to_a_pooled_cache: 500,
    read_of_one_quantized_token: 250,
    append_to_one_sequence_many_times: 2000,
    append_to_a_sharded_cache: 500,
    store_beside_pinned_blocks: 1000,
}


@dataclass(frozen=True)
class Growth:
    """The processor time in seconds of `count` operations, and of FACTOR times as many."""

    name: str
    count: int
    few: float
    many: float

    @property
    def ratio(self) -> float:
        return self.many / self.few


def measure_growth(prepare: Callable[[int], Callable[[], object]], count: int) -> Growth:
    """Return the shortest times of REPEATS rounds. A round measures both, because the speed of a machine varies."""
    few, many = [], []
    for _ in range(REPEATS):
        few.append(_seconds(prepare(count)))
        many.append(_seconds(prepare(FACTOR * count)))
    return Growth(prepare.__name__.replace("_", " "), count, min(few), min(many))


def _seconds(run: Callable[[], object]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def main() -> None:
    print(f"{'':36} {'n':>6} {'n: ms':>9} {'4n: ms':>9} {'ratio':>6}")
    for prepare, count in GROWING.items():
        found = measure_growth(prepare, count)
        print(f"{found.name:36} {count:6} {1000 * found.few:9.1f} {1000 * found.many:9.1f} {found.ratio:6.1f}")


if __name__ == "__main__":
    main()
