"""The state machine of the family `pruned`, and the states that it should reach."""

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvref_conformance.families.pruned.model import Pruned
from kvref_conformance.fuzz.base_machine import TOKEN_COUNT, FamilyStateMachine, make_pair
from kvref_conformance.fuzz.row_generators import row_kinds
from kvref_conformance.fuzz.state_registry import ModelCall, register_error_states, state
from kvref_conformance.implementation_api import NDArray


class PrunedStateMachine(FamilyStateMachine):
    family = "pruned"

    @initialize(heads=st.sampled_from((2, 1, 3)), dim=st.sampled_from((1, 3)), most=st.sampled_from((9, 30, 4, 1)))
    def new(self, heads: int, dim: int, most: int) -> None:
        self.make_object(num_kv_heads=heads, head_dim=dim, max_tokens=most)

    @property
    def row(self) -> tuple[int, int]:
        return self.config["num_kv_heads"], self.config["head_dim"]

    @property
    def pruned_model(self) -> Pruned:
        found = self.models[self.objects[0]]
        assert isinstance(found, Pruned)
        return found

    def scores(self, seed: int, kinds: int, unit: float = 0.5) -> NDArray:
        """Scores of all stored tokens, multiples of a unit. kinds: how many different ones there are, so that some are equal."""
        shape = self.row[0], self.pruned_model.stored
        unit = min(unit, 6e3) if self.subject.dtype == "float16" else unit
        return (np.random.default_rng(seed).integers(-kinds, kinds, shape) * unit).astype(np.float32)

    def edits(self, which: int) -> dict[str, Callable[[int], Any]]:
        self.edited = self.objects[0]
        edits: dict[str, Callable[[int], Any]] = {
            "append": lambda number: self.append(1 + number, "uneven"),
            "prune": lambda number: self.prune(
                number, 4, max(1, self.pruned_model.stored - number), number % 2, number // 4, 0.5
            ),
        }
        return edits | self.cache_edits(lambda: self.pruned_model.end)

    @precondition(lambda self: self.objects)
    @rule(count=TOKEN_COUNT, kind=row_kinds())
    def append(self, count: int, kind: str) -> None:
        keys, values = make_pair(self.source, (count, *self.row), kind)
        self.call("append", self.objects[0], keys=keys, values=values)

    append_more = append  # a second rule makes appends more frequent

    @precondition(lambda self: self.objects)
    @rule(wrong=st.integers(0, 5), side=st.integers(0, 2))
    def append_wrong_arrays(self, wrong: int, side: int) -> None:
        keys, values = self.source.wrong_pair((2, *self.row), wrong, side)
        self.call("append", self.objects[0], keys=keys, values=values)

    @precondition(lambda self: self.objects)
    @rule(
        seed=st.integers(0, 99), kinds=st.sampled_from((9, 2, 1)), keep=st.integers(1, 12), sinks=st.sampled_from((0, 0, 1, 2)),
        recent=st.sampled_from((0, 0, 1, 3)), unit=st.sampled_from((0.5, 6e3, 3e37)),
    )  # fmt: skip
    def prune(self, seed: int, kinds: int, keep: int, sinks: int, recent: int, unit: float) -> None:
        named = {name: value for name, value in (("sinks", sinks), ("recent", recent)) if value}
        self.call("prune", self.objects[0], scores=self.scores(seed, kinds, unit), keep=keep, **named)

    prune_more = prune

    @precondition(lambda self: self.objects)
    @rule(wrong=st.sampled_from(("nan", "short", "long", "keep")), keep=st.integers(0, 3))
    def prune_with_invalid_arguments(self, wrong: str, keep: int) -> None:
        scores = self.scores(keep, 4)
        if wrong == "nan" and scores.size:
            scores[-1, -1] = np.nan
        elif wrong == "short":
            scores = scores[:, 1:]
        elif wrong == "long":
            scores = np.zeros((len(scores), scores.shape[1] + 1), np.float32)
        else:
            keep = -keep
        self.call("prune", self.objects[0], scores=scores, keep=keep)

    @precondition(lambda self: self.objects)
    @rule(back=st.sampled_from((0, 1, 2, 5, 20, -1)))
    def truncate(self, back: int) -> None:
        self.call("truncate", self.objects[0], length=self.pruned_model.end - back)

    @precondition(lambda self: self.objects)
    @rule()
    def clear(self) -> None:
        self.call("clear", self.objects[0])


register_error_states(
    "pruned", "ShapeMismatch", "DtypeMismatch", "NonFinite", "CapacityExceeded", "PositionOutOfRange", "NotTruncatable"
)


@state("pruned", "append")
def append_fills_the_cache(call: ModelCall) -> bool:
    return bool(call.tokens) and call.model.stored + call.tokens == call.model.most


@state("pruned", "append")
def append_after_eviction(call: ModelCall) -> bool:
    return bool(call.tokens) and call.model.stored < call.model.end


@state("pruned", "prune")
def tokens_are_evicted(call: ModelCall) -> bool:
    return bool(call.model.stored > call.args["keep"])


@state("pruned", "prune")
def tokens_are_evicted_again(call: ModelCall) -> bool:
    return bool(call.model.end > call.model.stored > call.args["keep"])


@state("pruned", "truncate")
def tokens_after_evicted_ones_are_truncated(call: ModelCall) -> bool:
    return bool(call.args["length"] < call.model.end and call.model.stored < call.model.end)
