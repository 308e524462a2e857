"""The state machine of the family `ragged`, and the states that it should reach."""

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvref_conformance.families.ragged.model import Ragged
from kvref_conformance.fuzz.base_machine import FamilyStateMachine, make_pair
from kvref_conformance.fuzz.row_generators import row_kinds
from kvref_conformance.fuzz.state_registry import ModelCall, register_error_states, state
from kvref_conformance.implementation_api import NDArray

MOST_ROWS = 5  # a batch does not grow beyond it
COUNTS = st.lists(st.sampled_from((1, 2, 0, 3, 1, 5, 4)), min_size=MOST_ROWS, max_size=MOST_ROWS)
PADDING = st.sampled_from((0.0, 7.0, np.nan, np.inf))
PADDED_COLUMNS = st.sampled_from((0, 0, 0, 1, 3))  # columns that are padding in every row


class RaggedStateMachine(FamilyStateMachine):
    family = "ragged"

    @initialize(
        rows=st.sampled_from((3, 2, 1)), heads=st.integers(1, 2), dim=st.sampled_from((1, 3)), most=st.sampled_from((30, 9, 4, 1))
    )
    def new(self, rows: int, heads: int, dim: int, most: int) -> None:
        self.make_object(batch_size=rows, num_kv_heads=heads, head_dim=dim, max_tokens=most)

    @property
    def model(self) -> Ragged:
        found = self.models[self.objects[0]]
        assert isinstance(found, Ragged)
        return found

    def padded(self, counts: list[int], left: bool, padding: float, more: int, kind: str) -> dict[str, Any]:
        """The arguments of a call that adds these numbers of tokens. more: columns that are padding in every row."""
        columns = max(counts) + more
        arrays = make_pair(self.source, (len(counts), self.model.heads, columns, self.model.dim), kind)
        for row, count in enumerate(counts):
            hidden = slice(0, columns - count) if left else slice(count, columns)
            for array in arrays:
                array[row, :, hidden] = padding
        named: dict[str, Any] = {"counts": counts} if min(counts) < columns else {}
        return dict(zip(("keys", "values"), arrays, strict=True)) | named | ({"left": True} if left else {})

    def numbers(self, number: int) -> list[int]:
        """A small number per row."""
        return [(number >> row) % 3 for row in range(len(self.model.rows))]

    def edits(self, which: int) -> dict[str, Callable[[int], Any]]:
        self.edited = self.objects[0]
        return {
            "append": lambda number: self.append(self.numbers(number) * MOST_ROWS, number % 2 > 0, 7.0, number // 4, "uneven"),
            "extend": lambda number: self.extend([number % 3, 2], 1 + number % 2, number > 3, 7.0, 0, "uneven"),
            "filter": lambda number: self.filter([number, 1, 0][: 1 + number % 3]),
            "trim": lambda number: self.trim(self.numbers(number) * MOST_ROWS, 0),
        }

    @precondition(lambda self: self.objects)
    @rule(counts=COUNTS, left=st.booleans(), padding=PADDING, more=PADDED_COLUMNS, kind=row_kinds())
    def append(self, counts: list[int], left: bool, padding: float, more: int, kind: str) -> None:
        counts = counts[: len(self.model.rows)]
        self.call("append", self.objects[0], **self.padded(counts, left, padding, more, kind))

    append_more = append  # a second rule makes appends more frequent

    @precondition(lambda self: self.objects)
    @rule(
        counts=COUNTS, number=st.sampled_from((1, 2)), left=st.booleans(), padding=PADDING, more=PADDED_COLUMNS, kind=row_kinds()
    )
    def extend(self, counts: list[int], number: int, left: bool, padding: float, more: int, kind: str) -> None:
        if len(self.model.rows) + number <= MOST_ROWS:
            self.call("extend", self.objects[0], **self.padded(counts[:number], left, padding, more, kind))

    @precondition(lambda self: self.objects)
    @rule(rows=st.lists(st.integers(0, 4), min_size=1, max_size=4))
    def filter(self, rows: list[int]) -> None:
        self.call("filter", self.objects[0], rows=[row % len(self.model.rows) for row in rows])

    @precondition(lambda self: self.objects)
    @rule(counts=COUNTS, more=st.sampled_from((0, 0, 0, 1)))
    def trim(self, counts: list[int], more: int) -> None:
        """more: tokens that the longest row lacks."""
        lengths = [len(row) for row in self.model.rows]
        removed = [min(count, length) for count, length in zip(counts, lengths, strict=False)]
        longest = lengths.index(max(lengths))
        removed[longest] = lengths[longest] + 1 if more else removed[longest]
        self.call("trim", self.objects[0], counts=removed)

    @precondition(lambda self: self.objects)
    @rule(count=st.sampled_from((1, 2, 4)), group=st.integers(1, 2), causal=st.booleans(), kind=row_kinds())
    def attend(self, count: int, group: int, causal: bool, kind: str) -> None:
        query = self.source.rows((len(self.model.rows), self.model.heads * group, count, self.model.dim), kind)
        self.call_quietly("attend", self.objects[0], query=query, scale=0.5, **({"causal": True} if causal else {}))

    attend_more = attend
    attend_again = attend

    @precondition(lambda self: self.objects)
    @rule(wrong=st.integers(0, 5), side=st.integers(0, 2))
    def append_wrong_arrays(self, wrong: int, side: int) -> None:
        keys, values = self.source.wrong_pair((len(self.model.rows), self.model.heads, 2, self.model.dim), wrong, side)
        self.call("append", self.objects[0], keys=keys, values=values)

    @precondition(lambda self: self.objects)
    @rule(
        name=st.sampled_from(("append", "extend", "trim", "filter", "read", "length")),
        wrong=st.sampled_from(("more", "fewer", "large", "negative")),
    )
    def call_with_an_invalid_number(self, name: str, wrong: str) -> None:
        rows = len(self.model.rows)
        bad = {"more": rows, "fewer": rows + 1, "large": 99, "negative": -1}[wrong]
        counts = {"more": [1] * (rows + 1), "fewer": [1] * (rows - 1)}.get(wrong, [1] * (rows - 1) + [bad])
        keys, values = make_pair(self.source, (rows, self.model.heads, 2, self.model.dim), "counting")
        arguments: dict[str, dict[str, Any]] = {
            "append": {"keys": keys, "values": values, "counts": counts},
            "extend": {"keys": keys, "values": values, "counts": counts},
            "trim": {"counts": counts},
            "filter": {"rows": [] if wrong == "fewer" else [0, bad]},
        }
        self.call(name, self.objects[0], **arguments.get(name, {"row": bad}))


register_error_states("ragged", "ShapeMismatch", "DtypeMismatch", "CapacityExceeded", "PositionOutOfRange", "RowOutOfRange")


def lengths(call: ModelCall) -> list[int]:
    return [len(row) for row in call.model.rows]


def is_ragged(call: ModelCall) -> bool:
    return len(set(lengths(call))) > 1


def added(call: ModelCall) -> list[int]:
    """The number of tokens that each row gets."""
    return list(call.args.get("counts") or [call.tokens] * len(call.args["values"]))


def has_bad_padding(array: NDArray) -> bool:
    return bool(np.isnan(array).any())


@state("ragged", "append")
def tokens_follow_rows_of_different_lengths(call: ModelCall) -> bool:
    return is_ragged(call) and any(added(call))


@state("ragged", "append")
def different_numbers_follow_rows_of_different_lengths(call: ModelCall) -> bool:
    return is_ragged(call) and len(set(added(call))) > 1


@state("ragged", "append")
def a_row_with_tokens_gets_none(call: ModelCall) -> bool:
    return any(length and not count for length, count in zip(lengths(call), added(call), strict=True)) and any(added(call))


@state("ragged", "append")
def a_row_is_filled(call: ModelCall) -> bool:
    return call.model.most in map(sum, zip(lengths(call), added(call), strict=True)) and any(added(call))


@state("ragged", "append")
def tokens_follow_a_filter(call: ModelCall) -> bool:
    return call.model.last_change == "filter" and is_ragged(call) and any(added(call))


@state("ragged", "append")
def tokens_follow_a_trim(call: ModelCall) -> bool:
    return call.model.last_change == "trim" and is_ragged(call) and any(added(call))


@state("ragged", "append")
def tokens_follow_added_rows(call: ModelCall) -> bool:
    return call.model.last_change == "extend" and is_ragged(call) and any(added(call))


@state("ragged", "append", "extend")
def padding_on_the_left_contains_nan(call: ModelCall) -> bool:
    return bool(call.args.get("left")) and has_bad_padding(call.args["keys"])


@state("ragged", "append", "extend")
def padding_on_the_right_contains_nan(call: ModelCall) -> bool:
    return not call.args.get("left") and len(set(added(call))) > 1 and has_bad_padding(call.args["keys"])


@state("ragged", "extend")
def longer_rows_are_added(call: ModelCall) -> bool:
    return max(added(call)) > max(lengths(call)) > 0


@state("ragged", "extend")
def shorter_rows_are_added(call: ModelCall) -> bool:
    return max(lengths(call)) > max(added(call)) > 0


@state("ragged", "extend")
def rows_are_added_to_empty_rows(call: ModelCall) -> bool:
    return not any(lengths(call)) and any(added(call))


@state("ragged", "extend")
def empty_rows_are_added(call: ModelCall) -> bool:
    return any(lengths(call)) and 0 in added(call)


@state("ragged", "filter")
def the_longest_row_is_removed(call: ModelCall) -> bool:
    before = lengths(call)
    rows: list[int] = call.args["rows"]
    return max(before[row] for row in rows) < max(before)


@state("ragged", "filter")
def rows_of_different_lengths_change_places(call: ModelCall) -> bool:
    rows = call.args["rows"]
    return is_ragged(call) and bool(sorted(rows) == list(range(len(lengths(call)))) != rows)


@state("ragged", "filter")
def a_row_with_tokens_repeats(call: ModelCall) -> bool:
    rows = call.args["rows"]
    return any(lengths(call)[row] > 0 and rows.count(row) > 1 for row in rows)


@state("ragged", "trim")
def different_numbers_are_trimmed(call: ModelCall) -> bool:
    return len(set(call.args["counts"])) > 1


@state("ragged", "trim")
def the_longest_row_becomes_shorter_than_another(call: ModelCall) -> bool:
    before = lengths(call)
    after = [length - count for length, count in zip(before, call.args["counts"], strict=True)]
    longest = before.index(max(before))
    return before.count(before[longest]) == 1 and bool(after[longest] < max(after))


@state("ragged", "attend")
def rows_of_different_lengths_attend(call: ModelCall) -> bool:
    return is_ragged(call) and not call.args.get("causal")


@state("ragged", "attend")
def causal_queries_of_rows_of_different_lengths_attend(call: ModelCall) -> bool:
    return is_ragged(call) and bool(call.args.get("causal")) and call.args["query"].shape[2] > 1


@state("ragged", "attend")
def an_empty_row_attends_beside_others(call: ModelCall) -> bool:
    return 0 in lengths(call) and any(lengths(call))
