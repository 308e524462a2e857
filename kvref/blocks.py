"""Blocks of slots, handed out and taken back: the pool and the table that PagedAttention stands on.

A block is `block_size` consecutive slots of the key and the value store. The pool knows which blocks are free; a table lists, for
each layer of one sequence, which blocks hold its tokens, in order.
"""

from kvref.errors import BlockNotAllocated, LayerOutOfRange, OutOfBlocks, in_range, is_integer, whole


class BlockPool:
    """`num_blocks` blocks, each free or held by exactly one owner (LAW-03). A pool of none is allowed (BLOCK-06)."""

    def __init__(self, num_blocks: int) -> None:
        whole("num_blocks", num_blocks, minimum=0)
        self.num_blocks = num_blocks
        self._free = list(reversed(range(num_blocks)))  # handed out from the end
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._used)

    @property
    def utilization(self) -> float:
        """used / total in [0, 1]; 0.0 for a pool of none."""
        return self.num_used / self.num_blocks if self.num_blocks else 0.0

    def allocate(self) -> int:
        """A block no one holds. Raises OutOfBlocks when every block is held."""
        if not self._free:
            raise OutOfBlocks(f"allocate: expected a free block, got none of {self.num_blocks}")
        block = self._free.pop()
        self._used.add(block)
        return block

    def free(self, block: int) -> None:
        """Give `block` back. Raises BlockNotAllocated unless it is held: a block freed twice would get two owners (BLOCK-05)."""
        if not is_integer(block) or block not in self._used:
            raise BlockNotAllocated(f"free: expected a block that is held, got {block!r}")
        self._used.remove(block)
        self._free.append(block)


class BlockTable:
    """The blocks of one sequence: one list a layer, position p in entry p // block_size (PAGED-06)."""

    def __init__(self, num_layers: int, block_size: int) -> None:
        whole("num_layers", num_layers)
        whole("block_size", block_size)
        self._block_size = block_size
        self._layers: list[list[int]] = [[] for _ in range(num_layers)]

    def append(self, layer: int, block: int) -> None:
        self._layer(layer).append(block)

    def lookup(self, layer: int, logical_block: int) -> int | None:
        """The block that holds the layer's `logical_block`-th stretch of tokens, or None past the end."""
        blocks = self._layer(layer)
        return blocks[logical_block] if 0 <= logical_block < len(blocks) else None

    def blocks(self, layer: int) -> list[int]:
        return list(self._layer(layer))

    def capacity(self, layer: int) -> int:
        """Tokens the layer's blocks have room for."""
        return len(self._layer(layer)) * self._block_size

    def slot(self, layer: int, position: int) -> int:
        """block * block_size + offset, for a position within capacity."""
        return self._layer(layer)[position // self._block_size] * self._block_size + position % self._block_size

    def _layer(self, layer: int) -> list[int]:
        in_range(layer, len(self._layers), LayerOutOfRange, "layer")
        return self._layers[layer]
