"""The state machine of the family `cross`, and the states that it should reach."""

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvref_conformance.families.cross.model import Cross
from kvref_conformance.fuzz.base_machine import FamilyStateMachine, make_pair
from kvref_conformance.fuzz.row_generators import row_kinds
from kvref_conformance.fuzz.state_registry import ModelCall, register_error_states, state

MOST_ROWS = 4  # a batch does not grow beyond it
COUNTS = st.lists(st.sampled_from((1, 2, 0, 3, 5, 4)), min_size=MOST_ROWS, max_size=MOST_ROWS)
PADDING = st.sampled_from((0.0, 7.0, np.nan, np.inf))
PADDED_COLUMNS = st.sampled_from((0, 0, 0, 1, 3))  # columns that are padding in every row


class CrossStateMachine(FamilyStateMachine):
    family = "cross"

    @initialize(
        rows=st.sampled_from((3, 2, 1)), heads=st.integers(1, 2), dim=st.sampled_from((1, 3)), most=st.sampled_from((20, 5, 2)),
        most_source=st.sampled_from((9, 4, 2)),
    )  # fmt: skip
    def new(self, rows: int, heads: int, dim: int, most: int, most_source: int) -> None:
        self.make_object(batch_size=rows, num_kv_heads=heads, head_dim=dim, max_tokens=most, max_source=most_source)

    @property
    def model(self) -> Cross:
        found = self.models[self.objects[0]]
        assert isinstance(found, Cross)
        return found

    def padded(self, counts: list[int], padding: float, more: int, kind: str) -> dict[str, Any]:
        """The arguments of a call that adds these numbers of entries. more: columns that are padding in every row."""
        columns = max(counts) + more
        arrays = make_pair(self.source, (len(counts), self.model.heads, columns, self.model.dim), kind)
        for row, count in enumerate(counts):
            for array in arrays:
                array[row, :, count:] = padding
        named: dict[str, Any] = {"counts": counts} if min(counts) < columns else {}
        return dict(zip(("keys", "values"), arrays, strict=True)) | named

    def numbers(self, number: int) -> list[int]:
        """A small number per row."""
        return [(number >> row) % 3 for row in range(len(self.model.rows))]

    def edits(self, which: int) -> dict[str, Callable[[int], Any]]:
        self.edited = self.objects[0]
        return {
            "write_source": lambda number: self.write_source(
                number, self.numbers(number) * MOST_ROWS, 7.0, number // 4, "uneven"
            ),
            "append": lambda number: self.append(self.numbers(number) * MOST_ROWS, 7.0, number // 4, "uneven"),
            "trim": lambda number: self.trim(self.numbers(number) * MOST_ROWS, 0),
            "filter": lambda number: self.filter([number, 1, 0][: 1 + number % 3], False),
            "clear": self.clear,
        }

    @precondition(lambda self: self.objects)
    @rule(chosen=st.integers(0, 15), counts=COUNTS, padding=PADDING, more=PADDED_COLUMNS, kind=row_kinds())
    def write_source(self, chosen: int, counts: list[int], padding: float, more: int, kind: str) -> None:
        """chosen: which of the rows without a source get one, as bits; the largest numbers also reverse their order."""
        free = [row for row, source in enumerate(self.model.sources) if source is None]
        rows = [row for at, row in enumerate(free) if chosen >> at & 1 or at == chosen % max(len(free), 1)]
        rows = rows[::-1] if chosen > 7 else rows
        if rows:
            counts = [min(count, self.model.most_source) for count in counts[: len(rows)]]
            self.call("write_source", self.objects[0], rows=rows, **self.padded(counts, padding, more, kind))

    write_more_sources = write_source  # a second rule makes them more frequent

    @precondition(lambda self: self.objects)
    @rule(rows=st.lists(st.integers(0, 3), min_size=1, max_size=3), counts=COUNTS)
    def write_source_to_any_rows(self, rows: list[int], counts: list[int]) -> None:
        rows = [row % len(self.model.rows) for row in rows]
        self.call("write_source", self.objects[0], rows=rows, **self.padded(counts[: len(rows)], 7.0, 0, "counting"))

    @precondition(lambda self: self.objects)
    @rule(counts=COUNTS, padding=PADDING, more=PADDED_COLUMNS, kind=row_kinds())
    def append(self, counts: list[int], padding: float, more: int, kind: str) -> None:
        self.call("append", self.objects[0], **self.padded(counts[: len(self.model.rows)], padding, more, kind))

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
    @rule(rows=st.lists(st.integers(0, 3), min_size=1, max_size=MOST_ROWS), trims=st.booleans())
    def filter(self, rows: list[int], trims: bool) -> None:
        """trims: whether a token is removed from the first row afterwards."""
        self.call("filter", self.objects[0], rows=[row % len(self.model.rows) for row in rows])
        if trims:
            self.trim([1, 0, 0, 0], 0)

    @precondition(lambda self: self.objects)
    @rule(row=st.integers(0, 3))
    def clear(self, row: int) -> None:
        self.call("clear", self.objects[0], row=row % len(self.model.rows))

    @precondition(lambda self: self.objects)
    @rule(count=st.sampled_from((1, 2, 4)), group=st.integers(1, 2), kind=row_kinds())
    def attend_source(self, count: int, group: int, kind: str) -> None:
        query = self.source.rows((len(self.model.rows), self.model.heads * group, count, self.model.dim), kind)
        self.call_quietly("attend_source", self.objects[0], query=query, scale=0.5)

    attend_more = attend_source

    @precondition(lambda self: self.objects)
    @rule(name=st.sampled_from(("append", "write_source")), wrong=st.integers(0, 5), side=st.integers(0, 2))
    def add_wrong_arrays(self, name: str, wrong: int, side: int) -> None:
        rows = len(self.model.rows)
        keys, values = self.source.wrong_pair((rows, self.model.heads, 2, self.model.dim), wrong, side)
        named: dict[str, Any] = {"rows": list(range(rows))} if name == "write_source" else {}
        self.call(name, self.objects[0], **named, keys=keys, values=values)

    @precondition(lambda self: self.objects)
    @rule(
        name=st.sampled_from(
            ("write_source", "append", "trim", "filter", "clear", "read", "read_source", "length", "source_length")
        ),
        wrong=st.sampled_from(("more", "fewer", "large", "negative")),
    )  # fmt: skip
    def call_with_an_invalid_number(self, name: str, wrong: str) -> None:
        rows = len(self.model.rows)
        bad = {"more": rows, "fewer": rows + 1, "large": 99, "negative": -1}[wrong]
        counts = {"more": [1] * (rows + 1), "fewer": [1] * (rows - 1)}.get(wrong, [1] * (rows - 1) + [bad])
        keys, values = make_pair(self.source, (rows, self.model.heads, 2, self.model.dim), "counting")
        arguments: dict[str, dict[str, Any]] = {
            "write_source": {"rows": list(range(rows)), "keys": keys, "values": values, "counts": counts},
            "append": {"keys": keys, "values": values, "counts": counts},
            "trim": {"counts": counts},
            "filter": {"rows": [] if wrong == "fewer" else [0, bad]},
        }
        self.call(name, self.objects[0], **arguments.get(name, {"row": bad}))


register_error_states(
    "cross", "ShapeMismatch", "DtypeMismatch", "CapacityExceeded", "PositionOutOfRange", "RowOutOfRange", "SourceNotWritten",
    "SourceAlreadyWritten",
)  # fmt: skip


def source_lengths(call: ModelCall) -> list[int | None]:
    return [None if source is None else len(source) for source in call.model.sources]


def added(call: ModelCall) -> list[int]:
    """The number of entries that each row of the call gets."""
    return list(call.args.get("counts") or [call.args["keys"].shape[2]] * len(call.args["keys"]))


def has_bad_padding(call: ModelCall) -> bool:
    return bool(np.isnan(call.args["keys"]).any())


@state("cross", "write_source")
def sources_of_different_lengths_are_written(call: ModelCall) -> bool:
    return len(set(added(call))) > 1


@state("cross", "write_source")
def some_rows_get_a_source(call: ModelCall) -> bool:
    return len(call.args["rows"]) < len(call.model.rows)


@state("cross", "write_source")
def rows_get_sources_in_another_order(call: ModelCall) -> bool:
    rows: list[int] = call.args["rows"]
    return len(set(rows)) == len(rows) and rows != sorted(rows)


@state("cross", "write_source")
def a_source_without_entries_is_written(call: ModelCall) -> bool:
    return 0 in added(call)


@state("cross", "write_source")
def a_shorter_source_follows_a_longer_one(call: ModelCall) -> bool:
    pairs = zip(call.args["rows"], added(call), strict=True)
    return any(call.model.sources[row] is None and call.model.former[row] > count > 0 for row, count in pairs)


@state("cross", "write_source")
def a_row_with_tokens_gets_a_source(call: ModelCall) -> bool:
    return any(call.model.rows[row] for row in call.args["rows"])


@state("cross", "write_source", "append")
def padding_contains_nan(call: ModelCall) -> bool:
    return has_bad_padding(call)


@state("cross", "write_source")
def a_source_is_filled(call: ModelCall) -> bool:
    return call.model.most_source in added(call)


@state("cross", "append")
def tokens_follow_a_filter(call: ModelCall) -> bool:
    return call.model.last_change == "filter" and any(added(call))


@state("cross", "append")
def a_row_with_a_source_gets_tokens(call: ModelCall) -> bool:
    return any(source and count for source, count in zip(call.model.sources, added(call), strict=False))


@state("cross", "trim")
def tokens_of_a_row_with_a_source_are_trimmed(call: ModelCall) -> bool:
    return any(source and count for source, count in zip(call.model.sources, call.args["counts"], strict=False))


@state("cross", "trim")
def some_rows_are_trimmed_directly_after_a_filter(call: ModelCall) -> bool:
    return call.model.last_change == "filter" and any(call.args["counts"]) and 0 in call.args["counts"]


@state("cross", "filter")
def rows_with_different_sources_change_places(call: ModelCall) -> bool:
    rows: list[int] = call.args["rows"]
    return sorted(rows) == list(range(len(call.model.rows))) != rows and len(set(source_lengths(call))) > 1


@state("cross", "filter")
def a_row_with_a_source_repeats(call: ModelCall) -> bool:
    rows: list[int] = call.args["rows"]
    return any(call.model.sources[row] and rows.count(row) > 1 for row in rows)


@state("cross", "filter")
def a_row_without_a_source_moves(call: ModelCall) -> bool:
    pairs = enumerate(call.args["rows"])
    return any(call.model.sources[row] is None and at != row for at, row in pairs) and any(call.model.sources)


@state("cross", "clear")
def a_row_with_both_parts_is_cleared(call: ModelCall) -> bool:
    row: int = call.args["row"]
    return bool(call.model.sources[row] and call.model.rows[row])


@state("cross", "attend_source")
def sources_of_different_lengths_are_attended_to(call: ModelCall) -> bool:
    return None not in call.model.sources and len(set(source_lengths(call))) > 1


@state("cross", "attend_source")
def a_source_without_entries_is_attended_to_beside_others(call: ModelCall) -> bool:
    lengths = source_lengths(call)
    return None not in lengths and 0 in lengths and any(lengths)


@state("cross", "attend_source")
def several_queries_attend_after_an_append(call: ModelCall) -> bool:
    return None not in call.model.sources and any(call.model.rows) and call.args["query"].shape[2] > 1
