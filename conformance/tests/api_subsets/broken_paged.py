"""Bugs in paged caches with few operations."""

from typing import Any

import numpy as np

from api_subsets import append_only, one_table, paged
from api_subsets.append_only import AppendOnly
from api_subsets.breaking import breaks
from api_subsets.errors import LayerOutOfRange, OutOfBlocks, PositionOutOfRange
from api_subsets.given import index, tokens
from api_subsets.one_table import OneTable
from api_subsets.paged import Paged, Sequence


@breaks("PAGED-01", Paged)
class AnIdComesBack(paged.Cache):
    def drop(self, sequence: int) -> None:
        super().drop(sequence)
        self.created = sequence


@breaks("PAGED-02", Paged)
class ANewSequenceTakesABlock(paged.Cache):
    def create(self) -> int:
        sequence = super().create()
        self.take({sequence: min(1, len(self.free) // self.num_layers)})
        return sequence


@breaks("PAGED-03", Paged)
class ALayerTakesItsBlocksLater(paged.Cache):
    """Each layer allocates when it is written to, not all at once: a step can fail halfway."""

    def write(self, sequence: int, layer: int, start: int, keys: Any, values: Any) -> None:
        found, layer = self.found(sequence), self.layer(layer)
        start = index(start, found.lengths[layer] + 1, PositionOutOfRange)
        tokens((keys, values), (None, *self.row), self.dtypes)
        end, table = start + len(keys), found.tables[layer]
        missing = max(0, -(-end // self.block_size) - len(table))
        if missing > len(self.free):
            raise OutOfBlocks(f"out of blocks: {missing} needed, {len(self.free)} free")
        table += [self.free.pop(0) for _ in range(missing)]
        self.store(found, layer, np.arange(start, end), keys, values)
        found.lengths[layer] = max(found.lengths[layer], end)


@breaks("PAGED-04", Paged)
class CapacityShrinks(paged.Cache):
    def ensure_capacity(self, sequence: int, num_tokens: int) -> None:
        super().ensure_capacity(sequence, num_tokens)
        found = self.found(sequence)
        keep = -(-max(num_tokens, *found.lengths) // self.block_size)
        for table in found.tables:
            self.free += table[keep:]
            del table[keep:]


@breaks("PAGED-05", Paged)
class WhatWasTakenIsKept(paged.Cache):
    def take(self, missing: dict[int, int]) -> None:
        for sequence, count in missing.items():
            for table in self.sequences[sequence].tables:
                for _ in range(count):
                    if not self.free:
                        raise OutOfBlocks("out of blocks: 1 needed, 0 free")
                    table.append(self.free.pop(0))


@breaks("PAGED-07", Paged)
class ThePartlyFilledBlockIsLost(paged.Cache):
    def drop(self, sequence: int) -> None:
        found = self.found(sequence)
        for table in found.tables:
            self.free += table[: max(found.lengths) // self.block_size]
        del self.sequences[sequence]


@breaks("PAGED-08", Paged)
class ADroppedSequenceIsReadable(paged.Cache):
    def drop(self, sequence: int) -> None:
        for table in self.found(sequence).tables:
            self.free += table


@breaks("PAGED-09", Paged)
class LengthIsCapacity(paged.Cache):
    def length(self, sequence: int, layer: int) -> int:
        return len(self.found(sequence).tables[self.layer(layer)]) * self.block_size


@breaks("PAGED-09", Paged)
class OverwritingTruncates(paged.Cache):
    def write(self, sequence: int, layer: int, start: int, keys: Any, values: Any) -> None:
        super().write(sequence, layer, start, keys, values)
        self.found(sequence).lengths[layer] = start + len(keys)


@breaks("PAGED-10", Paged)
class AWriteLeavesAHole(paged.Cache):
    def write(self, sequence: int, layer: int, start: int, keys: Any, values: Any) -> None:
        found, layer = self.found(sequence), self.layer(layer)
        found.lengths[layer] = max(found.lengths[layer], index(start, None, PositionOutOfRange))
        super().write(sequence, layer, start, keys, values)


@breaks("PAGED-11", Paged)
class OverwritingFillsTheBlock(paged.Cache):
    def store(self, found: Sequence, layer: int, positions: Any, keys: Any, values: Any) -> None:
        super().store(found, layer, positions, keys, values)
        if len(positions) and positions[-1] + 1 < found.lengths[layer]:
            super().store(found, layer, positions[-1:] + 1, keys[-1:], values[-1:])


@breaks("PAGED-12", Paged)
class BlocksAreReadInOrderOfTheirNumbers(paged.Cache):
    def read(self, sequence: int, layer: int, positions: Any) -> tuple[Any, Any]:
        found, layer = self.found(sequence), self.layer(layer)
        table = found.tables[layer]
        found.tables[layer] = sorted(table)
        try:
            return super().read(sequence, layer, positions)
        finally:
            found.tables[layer] = table


@breaks("PAGED-13", Paged)
class ABlockIsInTwoTables(paged.Cache):
    """The last block of a dropped sequence is freed more than once, and allocated first."""

    def drop(self, sequence: int) -> None:
        again = self.found(sequence).tables[0][-1:]
        super().drop(sequence)
        self.free = again + again + self.free


@breaks("PAGED-14", Paged)
class BlocksAreSixteen(paged.Cache):
    """Shifts and masks for blocks of 16, whatever the block size."""

    def places(self, table: list[int], positions: Any) -> tuple[Any, Any]:
        if self.block_size & (self.block_size - 1) == 0:
            return super().places(table, positions)
        shift = self.block_size.bit_length() - 1
        return np.array(table, dtype=int)[np.minimum(positions >> shift, len(table) - 1)], positions & ((1 << shift) - 1)


@breaks("PAGED-15", Paged)
class UtilizationCountsTokens(paged.Cache):
    @property
    def utilization(self) -> float:
        tokens = sum(sum(sequence.lengths) for sequence in self.sequences.values())
        return tokens / (self.num_blocks * self.block_size) if self.num_blocks else 0.0


@breaks("LAW-02", Paged)
class LayersShareATable(paged.Cache):
    def places(self, table: list[int], positions: Any) -> tuple[Any, Any]:
        first = next(found.tables[0] for found in self.sequences.values() if any(each is table for each in found.tables))
        return super().places(first, positions)


@breaks("LAW-05", Paged)
class WhatABlockHoldsIsReadable(paged.Cache):
    def read(self, sequence: int, layer: int, positions: Any) -> tuple[Any, Any]:
        table = self.found(sequence).tables[self.layer(layer)]
        here = [index(position, len(table) * self.block_size, PositionOutOfRange) for position in positions]
        at = self.places(table, np.array(here, dtype=int))
        return self.keys[at], self.values[at]


@breaks("LAW-01", Paged)
class BlocksAreTakenBeforeTheLayerIsLookedAt(paged.Cache):
    def write(self, sequence: int, layer: int, start: int, keys: Any, values: Any) -> None:
        self.ensure_capacity(sequence, max(0, start) + len(keys))
        super().write(sequence, layer, start, keys, values)


@breaks("LAW-17", Paged)
class EveryReadFillsOneArray(paged.Cache):
    def read(self, sequence: int, layer: int, positions: Any) -> tuple[Any, Any]:
        keys, values = super().read(sequence, layer, positions)
        self.scratch = getattr(self, "scratch", np.zeros((2, 4096, *self.row), np.float32))
        self.scratch[0, : len(keys)], self.scratch[1, : len(keys)] = keys, values
        return self.scratch[0, : len(keys)], self.scratch[1, : len(keys)]


@breaks("PAGED-16", AppendOnly)
class ABatchStopsHalfway(append_only.Cache):
    def append(self, sequences: Any, layer: int, keys: Any, values: Any) -> None:
        tokens((keys, values), (len(sequences), *self.row))
        for row, sequence in enumerate(sequences):
            super().append([sequence], layer, keys[row : row + 1], values[row : row + 1])


@breaks("PAGED-16", AppendOnly)
class ASequenceNamedTwiceGetsOneToken(append_only.Cache):
    def append(self, sequences: Any, layer: int, keys: Any, values: Any) -> None:
        layer = index(layer, self.num_layers, LayerOutOfRange)
        super().append(sequences, layer, keys, values)
        for sequence in set(sequences):
            self.filled[sequence][layer] -= list(sequences).count(sequence) - 1


@breaks("PAGED-07", AppendOnly)
class OnlyTheFirstLayersBlocksComeBack(append_only.Cache):
    def drop(self, sequence: int) -> None:
        self.known(sequence)
        self.free += self.blocks.pop(sequence)[0]
        del self.filled[sequence]


@breaks("PAGED-05", AppendOnly)
class EachLayerCountsItsBlocksAlone(append_only.Cache):
    """It checks for room for one layer only, not for all layers."""

    def room(self, sequences: Any, layer: int) -> None:
        layers, self.num_layers = self.num_layers, 1
        try:
            super().room(sequences, layer)
        except IndexError as error:
            raise OutOfBlocks("out of blocks in the other layers") from error
        finally:
            self.num_layers = layers


@breaks("LAW-02", OneTable)
class EveryLayerIsTheFirst(one_table.Cache):
    """One table for all layers, and also one memory."""

    def write(self, sequence: int, layer: int, start: int, keys: Any, values: Any) -> None:
        super().write(sequence, layer, start, keys, values)
        self.memory[:] = self.memory[:, layer : layer + 1]


@breaks("PAGED-07", OneTable)
class TheTableIsFreedOnceALayer(one_table.Cache):
    def drop(self, sequence: int) -> None:
        more = self.table(sequence) * (self.num_layers - 1)
        super().drop(sequence)
        self.free += more
