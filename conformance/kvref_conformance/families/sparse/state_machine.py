"""The state machine of the family `sparse`, and the states that it should reach."""

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvref_conformance.families.sparse.model import Sparse
from kvref_conformance.fuzz.base_machine import (
    ANY_INDEX,
    TOKEN_COUNT,
    TRUNCATION,
    make_pair,
)
from kvref_conformance.fuzz.offloading_machine import OffloadingMachine
from kvref_conformance.fuzz.row_generators import row_kinds
from kvref_conformance.fuzz.state_registry import ModelCall, register_error_states, state
from kvref_conformance.implementation_api import NDArray

SEED = st.integers(0, 99)


class SparseStateMachine(OffloadingMachine):
    family = "sparse"

    @initialize(
        blocks=st.sampled_from((6, 9, 4, 20, 1, 0)), size=st.sampled_from((2, 3, 1, 4)), heads=st.sampled_from((1, 2)),
        dim=st.sampled_from((1, 3)), index_dim=st.sampled_from((1, 2, 3)), top_k=st.sampled_from((2, 1, 3, 5)),
    )  # fmt: skip
    def new(self, blocks: int, size: int, heads: int, dim: int, index_dim: int, top_k: int) -> None:
        self.make_object(num_blocks=blocks, num_kv_heads=heads, head_dim=dim, index_dim=index_dim, top_k=top_k, block_size=size)
        for on in self.objects:
            self.call("create", on)

    @property
    def sparse_model(self) -> Sparse:
        found = self.models[self.objects[0]]
        assert isinstance(found, Sparse)
        return found

    def integers(self, seed: int, *shape: int) -> NDArray:
        """Small integers, so that index scores are exact and some are equal."""
        return np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32)

    def append_to(self, sequence: int, count: int, kind: str, seed: int) -> None:
        model = self.sparse_model
        keys, values = make_pair(self.source, (count, *model.row), kind)
        index_keys = self.integers(seed, count, model.index_dim)
        self.call("append", self.objects[0], sequence=sequence, keys=keys, values=values, index_keys=index_keys)

    def index_arguments(self, seed: int, queries: int, heads: int) -> dict[str, NDArray]:
        shape = (queries, heads)
        return {
            "index_queries": self.integers(seed, *shape, self.sparse_model.index_dim),
            "weights": self.integers(seed + 1, *shape),
        }

    def write_edits(self) -> dict[str, Callable[[int], Any]]:
        return {"append": lambda number: self.append_to(self.edited, 1 + number % 4, "uneven", number)}

    @precondition(lambda self: self.objects)
    @rule(index=ANY_INDEX, count=TOKEN_COUNT, kind=row_kinds(), seed=SEED)
    def append(self, index: int, count: int, kind: str, seed: int) -> None:
        self.append_to(self.one_of("sequence", index), count, kind, seed)

    append_more = append  # a second rule makes appends more frequent

    @precondition(lambda self: self.objects)
    @rule(index=ANY_INDEX, wrong=st.integers(0, 5), side=st.integers(0, 2), uneven=st.sampled_from((0, 0, -1, 1)))
    def append_wrong_arrays(self, index: int, wrong: int, side: int, uneven: int) -> None:
        model, sequence = self.sparse_model, self.one_of("sequence", index)
        keys, values = self.source.wrong_pair((2, *model.row), wrong, side)
        if uneven:
            keys, values = make_pair(self.source, (2, *model.row), "uneven")
        index_keys = self.integers(wrong, 2 + uneven, model.index_dim)
        self.call("append", self.objects[0], sequence=sequence, keys=keys, values=values, index_keys=index_keys)

    @precondition(lambda self: self.objects)
    @rule(count=TOKEN_COUNT, seed=SEED)
    def create(self, count: int, seed: int) -> None:
        sequence = self.call("create", self.objects[0])
        if sequence is not None:
            self.append_to(sequence, count, "uneven", seed)

    @precondition(lambda self: self.objects)
    @rule(index=ANY_INDEX, own=TOKEN_COUNT, childs=TOKEN_COUNT, seed=SEED)
    def fork(self, index: int, own: int, childs: int, seed: int) -> None:
        sequence = self.one_of("sequence", index)
        child = self.call("fork", self.objects[0], sequence=sequence)
        if child is not None:
            self.append_to(child, childs, "uneven", seed)
            self.append_to(sequence, own, "uneven", seed + 1)

    @precondition(lambda self: self.objects)
    @rule(index=ANY_INDEX, back=TRUNCATION, count=TOKEN_COUNT, seed=SEED)
    def truncate(self, index: int, back: int, count: int, seed: int) -> None:
        sequence = self.one_of("sequence", index)
        self.call("truncate", self.objects[0], sequence=sequence, length=self.length(sequence) - back)
        self.append_to(sequence, count, "uneven", seed)

    @precondition(lambda self: self.objects)
    @rule(index=ANY_INDEX, number=st.sampled_from((np.nan, np.inf, -np.inf)), seed=SEED)
    def select_after_removed_numbers(self, index: int, number: float, seed: int) -> None:
        on, model, sequence = self.objects[0], self.sparse_model, self.one_of("sequence", index)
        length, rows = self.length(sequence), np.full((1, *model.row), number, np.float32)
        index_keys = np.full((1, model.index_dim), number, np.float32)
        self.call("append", on, sequence=sequence, keys=rows, values=rows, index_keys=index_keys)
        self.call("truncate", on, sequence=sequence, length=length)
        self.call("select", on, sequence=sequence, **self.index_arguments(seed, 1, 1))

    @precondition(lambda self: self.objects)
    @rule(
        index=ANY_INDEX, queries=st.sampled_from((1, 2, 3, 9)), heads=st.integers(1, 2), causal=st.booleans(), seed=SEED,
        wrong=st.sampled_from((False,) * 5 + (True,)),
    )  # fmt: skip
    def select(self, index: int, queries: int, heads: int, causal: bool, seed: int, wrong: bool) -> None:
        given: dict[str, Any] = self.index_arguments(seed, queries, heads)
        if wrong:
            given["weights"] = given["weights"][:, :-1]
        named = {"causal": True} if causal else {}
        self.call("select", self.objects[0], sequence=self.one_of("sequence", index), **given, **named)

    select_more = select

    @precondition(lambda self: self.objects)
    @rule(index=ANY_INDEX, queries=st.sampled_from((1, 2, 3, 9)), causal=st.booleans(), seed=SEED)
    def attend(self, index: int, queries: int, causal: bool, seed: int) -> None:
        heads, dim = self.sparse_model.row
        named: dict[str, Any] = {
            "query": self.source.rows((queries, 2 * heads, dim), "uneven"),
            **self.index_arguments(seed, queries, 2),
        }
        if causal:
            named |= {"causal": True}
        self.call("attend", self.objects[0], sequence=self.one_of("sequence", index), **named)

    @precondition(lambda self: self.objects)
    @rule(index=ANY_INDEX, change=st.sampled_from(("append", "truncate", "drop")), seed=SEED, times=st.integers(1, 2))
    def offload_and_restore(self, index: int, change: str, seed: int, times: int) -> None:
        on, sequence = self.objects[0], self.one_of("sequence", index)
        handle = self.call("offload", on, sequence=sequence)
        if change == "append":
            self.append_to(sequence, 2, "uneven", seed)
        else:
            self.call(change, on, sequence=sequence, **({"length": 0} if change == "truncate" else {}))
        if handle is not None:
            for _ in range(times):
                self.call("restore", on, handle=handle)
            self.call("discard", on, handle=handle)


register_error_states(
    "sparse",
    "SequenceNotFound",
    "KeyNotFound",
    "ShapeMismatch",
    "DtypeMismatch",
    "OutOfBlocks",
    "PositionOutOfRange",
)


@state("sparse", "append")
def a_shared_block_is_written_to(call: ModelCall) -> bool:
    state = call.model.sequences.get(call.args["sequence"])
    if state is None or not len(call.args["keys"]) or len(state.tokens) % call.model.size == 0:
        return False
    return any(other is not state and other.relatives == state.relatives for other in call.model.sequences.values())


@state("sparse", "append")
def a_removed_position_is_written_again(call: ModelCall) -> bool:
    return bool(call.model.last_change == "truncate" and len(call.args["keys"]))


@state("sparse", "select")
def more_tokens_are_seen_than_chosen(call: ModelCall) -> bool:
    state = call.model.sequences.get(call.args["sequence"])
    return state is not None and len(state.tokens) > call.model.top_k


@state("sparse", "restore")
def tokens_are_restored(call: ModelCall) -> bool:
    return bool(call.model.copies.get(call.args["handle"]))
