"""Wrong grouped caches."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kvref
from kvref.block_tables import NO_BLOCK
from kvref.prefix import PrefixIndexed, Tokens, block_keys
from kvref_zoo.mutant import mutant


@mutant("GROUP-06")
class GroupedBeginAddsReferencesLate(kvref.GroupedCache):
    """The blocks that `begin` finds for window groups get their reference at the end of the first step.

    The step itself can evict them.
    """

    def __init__(self, config: kvref.GroupedConfig) -> None:
        super().__init__(config)
        self.late: dict[int, list[int]] = {}

    def begin(self, tokens: Sequence[int], salt: str = "") -> int:
        sequence = super().begin(tokens, salt)
        windows = [self.block_table(sequence, layer) for layer in range(self.config.num_groups - 1)]
        self.late[sequence] = [block for table in windows for block in table if block != NO_BLOCK]
        self.pool.free_many(self.late[sequence])
        return sequence

    def step(self, sequence: int, keys: Any, values: Any) -> None:
        super().step(sequence, keys, values)
        self.hold(sequence)

    def drop(self, sequence: int) -> None:
        self.hold(sequence)
        super().drop(sequence)

    def hold(self, sequence: int) -> None:
        self.pool.share_many(self.late.pop(sequence, []))


@mutant("GROUP-05", also="GROUP-06", seen_in="ovg-project/kvcached#446")
class GroupedHitIgnoresTheWindows(kvref.GroupedCache):
    """The layers that see all tokens alone determine the hit.

    If blocks inside a window were evicted, window layers attend to the tokens that are left, and the same prompt gets another
    answer.
    """

    def _find_hit(self, tokens: Tokens, salt: str) -> tuple[list[bytes], NDArray[np.int32]]:
        found, groups, keys, rows = super()._find_hit, self.config.num_groups, list[bytes](), list[list[int]]()
        for key in block_keys(tokens[: max(0, len(tokens) - 1)], self.config.block_size, salt):
            copies = [self.pool.find(key + group.to_bytes(4, "little")) for group in range(groups)]
            if copies[-1] is None:
                break
            keys.append(key)
            rows.append([NO_BLOCK if copy is None else int(copy.blocks[0]) for copy in copies])
        blocks = np.array(rows, np.int32).reshape(len(keys), groups)
        blocks[np.arange(len(keys))[:, None] < self._unseen_entries(len(keys) * self.config.block_size)] = NO_BLOCK
        return (keys, blocks) if keys else found(tokens, salt)


@mutant("GROUP-03")
class GroupedStepAllocatesGroupByGroup(kvref.GroupedCache):
    """`step` allocates blocks for one group at a time.

    If there are none left for the second group, it keeps those of the first.
    """

    def step(self, sequence: int, keys: Any, values: Any) -> None:
        try:
            super().step(sequence, keys, values)
        except kvref.errors.OutOfBlocks:
            if self.num_free_blocks:
                self.pool.allocate()
            raise


@mutant("GROUP-02", also="GROUP-01 GROUP-03 GROUP-04 GROUP-05 GROUP-06 GROUP-07 SHARE-03", seen_in="vllm-project/vllm#42571")
class GroupedTablesKeepFreedBlocks(kvref.GroupedCache):
    """A block that a window released stays in the block table. It is freed a second time and allocated to two owners."""

    class Tables(kvref.BlockTables):
        def release(self, table: int, counts: int | NDArray[np.int64]) -> NDArray[np.int32]:
            return self.before(table, counts)

    def __init__(self, config: kvref.GroupedConfig) -> None:
        super().__init__(config)
        self._tables = self.Tables(config.num_groups, config.block_size)


@mutant("GROUP-07")
class GroupedTruncatesPastItsWindows(kvref.GroupedCache):
    """`truncate` accepts a length before which blocks of a window were released: the next query sees a window with a hole."""

    truncate = PrefixIndexed.truncate


@mutant("GROUP-02", also="GROUP-03 GROUP-04 GROUP-05 GROUP-06 GROUP-07 GROUP-08 LAW-04 SHARE-03")
class GroupedWindowsFreeEarly(kvref.GroupedCache):
    """A window group frees its oldest block while the next query still sees the last token in it."""

    def _unseen_entries(self, length: int) -> NDArray[np.int64]:
        return super()._unseen_entries(length + 1)


@mutant("GROUP-02", also="GROUP-03 GROUP-04 GROUP-05 GROUP-06 GROUP-07")
class GroupedWindowsFreeNothing(kvref.GroupedCache):
    """Window groups never free a block, as if their layers saw all tokens: long requests use up the pool."""

    def _unseen_entries(self, length: int) -> NDArray[np.int64]:
        return np.zeros(self.config.num_groups, np.int64)


@mutant("GROUP-05", also="GROUP-06", seen_in="vllm-project/vllm#42948")
class GroupedWindowsNeedEveryBlock(kvref.GroupedCache):
    """A window group finds a prompt only if every block of it is cached, also the blocks before the window.

    These were released and evicted, so that there is no hit.
    """

    def _find_hit(self, tokens: Tokens, salt: str) -> tuple[list[bytes], NDArray[np.int32]]:
        keys, rows = list[bytes](), list[list[int]]()
        for key in block_keys(tokens[: max(0, len(tokens) - 1)], self.config.block_size, salt):
            copies = [self.pool.find(key + group.to_bytes(4, "little")) for group in range(self.config.num_groups)]
            blocks = [int(copy.blocks[0]) for copy in copies if copy is not None]
            if len(blocks) < len(copies):
                break
            keys.append(key)
            rows.append(blocks)
        entries = np.array(rows, np.int32).reshape(len(keys), self.config.num_groups)
        entries[np.arange(len(keys))[:, None] < self._unseen_entries(len(keys) * self.config.block_size)] = NO_BLOCK
        return keys, entries
