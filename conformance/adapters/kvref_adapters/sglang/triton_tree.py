"""Adapter of SGLang's speculation trees over its Triton kernels: `sglang-triton-tree`.

`append` and `draft` are `alloc` of TokenToKVPoolAllocator and `set_kv_buffer` of MHATokenToKVPool, `drop` is `free`. Blocks are
slots. For `positions`, `ancestors` and `attend`, the tree is verified as EAGLE does: `sgl_build_tree_kernel_efficient_triton`
computes positions and mask, and `extend_attention_fwd` attends with this mask. The root of SGLang's tree is the last committed
token, whose key and value are computed with those of the nodes. `ancestors` is the row of the mask.

The adapter translates the parents to EAGLE's lists: the places of all nodes among the candidates of their levels, and of the
candidates that each level continues. The worker that accepts and rejects nodes needs a model, so the adapter does not offer it.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from kvref.errors import OutOfBlocks, SequenceNotFound
from kvref_adapters.sglang.triton_attention import SGLangTriton  # before the adapter
from kvref_conformance.exceptions import NotOffered

from kvref_adapters.sglang import adapter  # isort: skip
from kvref_adapters.sglang.modules import DEVICE  # isort: skip
from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd  # isort: skip
from sglang.kernels.ops.speculative.spec_tree import sgl_build_tree_kernel_efficient_triton  # isort: skip

FULL_MASK = 0  # TreeMaskMode.FULL_MASK


class SGLangTritonTree(SGLangTriton):
    name = "sglang-triton-tree"
    limits: ClassVar[dict[str, Any]] = {"dtype": ["float32"], "block_size": 1, "tokens": {"least": 1}, "threads": False}

    def tree(self, *, num_blocks: int, num_kv_heads: int, head_dim: int, block_size: int) -> "Trees":
        return Trees(num_blocks, num_kv_heads, head_dim, block_size)


class Slots:
    """The slots of a sequence: those of committed tokens, then those of the nodes."""

    def __init__(self) -> None:
        self.slots = torch.zeros(0, dtype=torch.int64)
        self.parents: list[int] = []

    @property
    def length(self) -> int:
        return len(self.slots) - len(self.parents)


class Trees:
    def __init__(self, num_blocks: int, num_kv_heads: int, head_dim: int, block_size: int) -> None:
        if not all(type(size) is int and size > 0 for size in (num_blocks, num_kv_heads, head_dim)) or block_size != 1:
            raise NotOffered("validation of sizes: they come from the model and the available memory")
        self._shape = num_kv_heads, head_dim
        self._pool = adapter.MEMORY_POOL.MHATokenToKVPool(
            num_blocks, 1, torch.float32, num_kv_heads, head_dim, 1, DEVICE, enable_memory_saver=False
        )
        self._allocator = adapter.ALLOCATOR.TokenToKVPoolAllocator(num_blocks, torch.float32, DEVICE, self._pool, need_sort=False)
        self._sequences: dict[int, Slots] = {}
        self._created = 0

    @property
    def num_free_blocks(self) -> int:
        return int(self._allocator.available_size())

    def create(self) -> int:
        self._sequences[self._created] = Slots()
        self._created += 1
        return self._created - 1

    def drop(self, sequence: int) -> None:
        self._allocator.free(self._of(sequence).slots)
        del self._sequences[sequence]

    def length(self, sequence: int) -> int:
        return self._of(sequence).length

    def append(self, sequence: int, keys: Any, values: Any) -> None:
        held = self._of(sequence)
        if held.parents:
            raise NotOffered("rejecting calls while a tree is open: the scheduler makes none")
        self._store(held, keys, values)

    def read(self, sequence: int) -> Any:
        held = self._of(sequence)
        return tuple(part[held.slots[: held.length]] for part in self._pool.get_kv_buffer(0))

    def draft(self, sequence: int, keys: Any, values: Any, parents: Sequence[int]) -> list[int]:
        held = self._of(sequence)
        first = len(held.parents)
        if len(parents) != len(keys) or any(not -1 <= parent < first + row for row, parent in enumerate(parents)):
            raise NotOffered("rejecting other parents: the draft worker computes them")
        if parents and not held.length:
            raise NotOffered("a tree without a committed token, which is its root")
        self._store(held, keys, values)
        held.parents += parents
        return list(range(first, len(held.parents)))

    def positions(self, sequence: int) -> list[int]:
        held = self._of(sequence)
        if not held.parents:
            return []
        order, _, positions = verification_of(held.parents, held.length - 1)
        return [int(positions[1 + order.index(node)]) for node in range(len(order))]

    def ancestors(self, sequence: int, node: int) -> list[int]:
        held = self._of(sequence)
        if not 0 <= node < len(held.parents):
            raise NotOffered("rejecting other nodes: the mask has a row for each node")
        order, mask, _ = verification_of(held.parents, held.length - 1)
        row = mask[1 + order.index(node), held.length :]
        return [each for each, seen in zip(order, row.tolist(), strict=True) if seen]

    def attend(self, sequence: int, nodes: Sequence[int], query: Any, scale: float | None = None) -> Any:
        held = self._of(sequence)
        self._check(query, query, heads=query.shape[1] if query.ndim == 3 and query.shape[1] % self._shape[0] == 0 else 0)
        if len(nodes) != len(query) or any(not -1 <= node < len(held.parents) for node in nodes):
            raise NotOffered("rejecting other nodes: a verification has a query for each node")
        if not held.length:
            raise NotOffered("a tree without a committed token, which is its root")
        order, mask, _ = verification_of(held.parents, held.length - 1)
        rows = [0 if node < 0 else 1 + order.index(node) for node in nodes]
        prefix, count = held.length - 1, 1 + len(order)
        slots = torch.cat([held.slots[prefix : held.length], held.slots[held.length :][order]])
        keys, values = self._pool.get_kv_buffer(0)
        result = torch.empty_like(query)
        for at, row in enumerate(rows):  # nodes can be repeated, and a verification has one query per node
            given = torch.zeros(count, *query.shape[1:])
            given[row] = query[at]
            out = torch.empty_like(given)
            extend_attention_fwd(
                given, keys[slots].contiguous(), values[slots].contiguous(), out, keys, values,
                torch.tensor([0, count], dtype=torch.int32), torch.tensor([0, prefix], dtype=torch.int32), held.slots[:prefix],
                mask.flatten(), True, torch.tensor([0, mask.numel()], dtype=torch.int64), count, 1.0, 1.0,
                sm_scale=self._shape[1] ** -0.5 if scale is None else scale,
            )  # fmt: skip
            result[at] = out[row]
        return result

    def _of(self, sequence: int) -> Slots:
        if sequence not in self._sequences:
            raise SequenceNotFound(f"unknown sequence {sequence}")
        return self._sequences[sequence]

    def _check(self, keys: Any, values: Any, heads: int) -> None:
        fits = all(each.ndim == 3 and each.shape[1:] == (heads, self._shape[1]) for each in (keys, values))
        if not heads or not fits or len(keys) != len(values) or keys.dtype != torch.float32 or values.dtype != torch.float32:
            raise NotOffered("rejecting other shapes and dtypes: one model computes keys, values and queries")

    def _store(self, held: Slots, keys: Any, values: Any) -> None:
        self._check(keys, values, self._shape[0])
        slots = self._allocator.alloc(len(keys))
        if slots is None:
            raise OutOfBlocks(f"alloc({len(keys)}) returned None")
        self._pool.set_kv_buffer(adapter.LAYER, slots, keys, values)
        held.slots = torch.cat([held.slots, slots.to(torch.int64)])


def verification_of(parents: list[int], prefix: int) -> tuple[list[int], Any, Any]:
    """The nodes in SGLang's order; the mask, bool [1 + nodes, prefix + 1 + nodes], and the positions, with the root first.

    prefix: the number of tokens before the root.
    """
    levels: list[list[int]] = []
    depths: list[int] = []
    for node, parent in enumerate(parents):
        depths.append(0 if parent < 0 else depths[parent] + 1)
        levels += [[]] if depths[node] == len(levels) else []
        levels[depths[node]].append(node)
    topk = max([1, *map(len, levels)])  # each node is one of the candidates that its level continues
    places: dict[int, int] = {}  # of each node, among the candidates of all levels
    order: list[int] = []
    for depth, level in enumerate(levels):
        before = levels[depth - 1] if depth else [-1]
        for beam, parent in enumerate(sorted(before, key=lambda node: places.get(node, -1))):
            for rank, node in enumerate(node for node in level if parents[node] == parent):
                places[node] = rank if not depth else topk + (depth - 1) * topk**2 + beam * topk + rank
                order.append(node)
    parent_list = torch.full((1, 1 + topk * len(levels)), -1)
    for depth, level in enumerate(levels):
        for beam, node in enumerate(sorted(level, key=places.__getitem__)):
            parent_list[0, 1 + depth * topk + beam] = places[node]
    count = 1 + len(order)
    mask, positions = torch.full((count * (prefix + count),), True), torch.empty(count, dtype=torch.int64)
    retrieve = torch.full((3, 1, count), -1)
    selected = torch.tensor([[places[node] for node in order]], dtype=torch.int64)
    sgl_build_tree_kernel_efficient_triton[(1,)](
        parent_list, selected, torch.tensor([prefix]), torch.tensor([0]), mask, positions, *retrieve, topk=topk,
        depth=max(1, len(levels)), draft_token_num=count, tree_mask_mode=FULL_MASK, batch_size=1,
        parent_list_stride=parent_list.stride(0), selected_index_stride=selected.stride(0),
    )  # fmt: skip
    return order, mask.view(count, prefix + count), positions
