"""What the checks of the transfer cache share."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise, product
from typing import Any

import numpy as np

from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.families.transfer.law_adapter import ranks_for
from kvref_conformance.families.transfer.model import Transfer
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.testlib.assertions import assert_equal, assert_pair
from kvref_conformance.testlib.fixtures import new_object, random_tokens
from kvref_conformance.testlib.session import Session

Rows = tuple[NDArray, NDArray]  # keys and values [num_layers, n, num_kv_heads, head_dim]
Part = tuple[int, tuple[int, int], tuple[int, int]]  # layer, range of positions, range of heads


class TransferFixture(Session):
    """A transfer cache with four heads on two ranks, if its limits allow them."""

    model: Transfer

    def __init__(self, subject: Subject, **changes: Any) -> None:
        heads = subject.size("num_kv_heads", changes.pop("num_kv_heads", 4))
        sizes = {"num_kv_heads": heads, "head_ranks": ranks_for(subject, heads)} | changes
        super().__init__(subject, lambda: new_object(subject, "transfer", **sizes))
        self.config = self.cache.config
        self.layers, self.heads, self.size = (self.config[name] for name in ("num_layers", "num_kv_heads", "block_size"))

    @property
    def room(self) -> int:
        """The number of tokens for which an empty cache has blocks."""
        return int(self.config["num_blocks"] // self.layers * self.size)

    def blocks(self, *lengths: int) -> int:
        """The number of blocks of sequences of these lengths that share none."""
        return int(self.layers * sum(-(-length // self.size) for length in lengths))

    def rows(self, count: int) -> Rows:
        sizes = self.layers * count, self.heads, self.config["head_dim"]
        shape = self.layers, count, *sizes[1:]
        keys, values = (random_tokens(self.subject, *sizes).reshape(shape) for _ in range(2))
        return keys, values

    def sequence_of(self, rows: Rows) -> int:
        sequence = int(self.cache.create())
        self.cache.append(sequence, *rows)
        return sequence

    def fill(self) -> int:
        """Create a sequence that allocates every free block. Returns its id."""
        return self.sequence_of(self.rows(self.cache.num_free_blocks // self.layers * self.size))

    def parts(self, length: int, *, cuts: Iterable[int] = (), splits: Iterable[int] = ()) -> list[Part]:
        """All rows of a transfer, divided by layer, before the positions `cuts` and before the heads `splits`."""
        tokens, heads = ([0, *each, stop] for each, stop in ((cuts, length), (splits, self.heads)))
        pairs = product(range(self.layers), pairwise(tokens), pairwise(heads))
        return [(layer, positions, span) for layer, positions, span in pairs if positions[0] < positions[1] and span[0] < span[1]]

    def arrive(self, transfer: int, rows: Rows, parts: Iterable[Part]) -> None:
        """Let these parts of the rows arrive."""
        for layer, (start, stop), (first, last) in parts:
            keys, values = (each[layer, start:stop, first:last] for each in rows)
            self.cache.arrive(transfer, layer, start, [first, last], keys, values)

    def received(self, rows: Rows, **division: Iterable[int]) -> int:
        """Begin a transfer, let all rows arrive, and commit it. Returns the id of the sequence."""
        length = rows[0].shape[1]
        transfer = self.cache.begin(length)
        self.arrive(transfer, rows, self.parts(length, **division))
        return int(self.cache.commit(transfer))

    def aborted(self, length: int) -> int:
        """Begin a transfer and abort it."""
        transfer = int(self.cache.begin(length))
        self.cache.abort(transfer)
        return transfer

    def sent(self, handle: int, length: int) -> list[Any]:
        """What `send` returns of each layer of an export, whole."""
        return [self.cache.send(handle, layer, [0, length], [0, self.heads]) for layer in range(self.layers)]

    def assert_reads(self, sequence: int, rows: Rows, what: str) -> None:
        """Raise ClauseViolation unless the sequence contains exactly these rows."""
        assert_equal(self.cache.length(sequence), rows[0].shape[1], f"length of {what}")
        for layer in range(self.layers):
            want = rows[0][layer], rows[1][layer]
            assert_pair(self.cache.gather(sequence, layer), want, f"layer {layer} of {what}")

    def assert_sends(self, handle: int, rows: Rows, what: str) -> None:
        """Raise ClauseViolation unless the export contains exactly these rows."""
        for layer, got in enumerate(self.sent(handle, rows[0].shape[1])):
            assert_pair(got, (rows[0][layer], rows[1][layer]), f"layer {layer} of {what}")

    def assert_free(self, blocks: int, when: str) -> None:
        assert_equal(self.cache.num_free_blocks, blocks, f"free blocks {when}")

    def need_room(self, tokens: int) -> None:
        if self.room < tokens:
            raise NotOffered(f"blocks for {tokens} tokens, where its limits leave {self.room}")

    def look(self, *names: str) -> None:
        super().look(*(names or ("num_free_blocks", "num_sequences", "length", "gather", "send")))

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Look before and after the calls of the block: the model must not have changed, and every reply must be correct."""
        self.look()
        yield
        self.look()


def concatenated(*parts: Rows) -> Rows:
    """The rows of several appends."""
    keys, values = (np.concatenate(each, axis=1) for each in zip(*parts, strict=True))
    return keys, values


def first(rows: Rows, count: int) -> Rows:
    """The first tokens of rows."""
    return rows[0][:, :count], rows[1][:, :count]
