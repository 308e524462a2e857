"""The state machine of the family `transfer`: two caches that send sequences to each other, and the states to reach."""

from collections.abc import Callable
from itertools import product
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvref_conformance.families.transfer.model import Owner, Transfer
from kvref_conformance.fuzz.base_machine import (
    ANY_INDEX,
    LAST_INDEX,
    TOKEN_COUNT,
    TRUNCATION,
    FamilyStateMachine,
    choose_one,
    make_pair,
)
from kvref_conformance.fuzz.row_generators import row_kinds
from kvref_conformance.fuzz.state_registry import NOTES, ModelCall, register_error_states, state

WHICH = st.integers(0, 5)
UNKNOWN = 10**6  # an id that was never returned
# Kv heads, and the ranks of both caches.
RANKS = st.sampled_from(((4, 2, 4), (2, 1, 2), (3, 3, 1), (2, 2, 2), (1, 1, 1), (6, 3, 2)))
LENGTH = st.sampled_from((1, 2, 3, 4, 5, 7, 2, 3, 0))
TIME = st.sampled_from((None, 5, 6, 7, None, 3))


class TransferStateMachine(FamilyStateMachine):
    family = "transfer"

    @initialize(
        ranks=RANKS, sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)), entries=st.sampled_from((6, 4, 8, 3, 12)),
        layers=st.sampled_from((1, 2, 2)), dim=st.sampled_from((1, 3)), caches=st.sampled_from((1, 2, 2)),
        dtype=st.sampled_from(("float32", "float16", "bfloat16")),
    )  # fmt: skip
    def new(
        self, ranks: tuple[int, int, int], sizes: tuple[int, int], entries: int, layers: int, dim: int, caches: int, dtype: str
    ) -> None:
        heads, *ranks_of = ranks
        for at in range(caches):
            self.make_object(
                num_blocks=entries * layers, block_size=sizes[at], num_layers=layers, num_kv_heads=heads, head_dim=dim,
                head_ranks=ranks_of[at], dtype=dtype,
            )  # fmt: skip
        for on in self.objects:
            self.call("create", on)

    # Objects and their ids.

    def cache(self, which: int) -> tuple[int, Transfer]:
        """One of the caches, and its model."""
        on = self.objects[which % len(self.objects)]
        model = self.models[on]
        assert isinstance(model, Transfer)
        return on, model

    def one_of(self, owners: dict[int, Owner], index: int, ids: set[int]) -> int:
        """The id of one of the owners, or for LAST_INDEX, or if there are none, one that exists no more, or never did."""
        gone = choose_one(ids - owners.keys(), index)
        found = None if index == LAST_INDEX else choose_one(owners, index)
        return found if found is not None else UNKNOWN if gone is None else gone

    def sequence(self, model: Transfer, index: int) -> int:
        return self.one_of(model.sequences, index, model.ids["sequence"])

    def transfer(self, model: Transfer, index: int, aborted: bool = False) -> int:
        return self.one_of(model.aborted if aborted else model.open, index, model.ids["transfer"])

    def handle(self, model: Transfer, index: int) -> int:
        return self.one_of(model.exports, index, model.ids["handle"])

    def open_transfer(self, on: int, index: int, length: int = 3, **deadline: int) -> int:
        """The id of an open transfer, which is begun if there is none; for LAST_INDEX that of none."""
        _, model = self.cache(self.objects.index(on))
        if index != LAST_INDEX and not any(held.length for held in model.open.values()):
            self.call("begin", on, length=length, **deadline)
        return self.transfer(model, index)

    def some_export(self, on: int, index: int) -> int:
        """The id of an export, which is made of a sequence with tokens if there is none; for LAST_INDEX that of none."""
        _, model = self.cache(self.objects.index(on))
        if index != LAST_INDEX and not any(held.length for held in model.exports.values()):
            sequence = self.sequence(model, index)
            self.append_to(on, sequence, 3, "uneven")
            self.call("export", on, sequence=sequence)
        return self.handle(model, index)

    def edits(self, which: int) -> dict[str, Callable[[int], Any]]:
        on, model = self.cache(which)
        self.edited = self.sequence(model, which // 2)

        def length() -> int:
            return model.sequences[self.edited].length if self.edited in model.sequences else 0

        def drop(number: int) -> None:
            self.call("drop", on, sequence=self.edited)
            self.edited = self.sequence(model, number)

        def export(number: int) -> None:
            self.call("export", on, sequence=self.edited)

        def continue_with(sequence: int | None) -> None:
            self.edited = self.edited if sequence is None else sequence

        def commit(number: int) -> None:
            transfer = self.open_transfer(on, number, number % 2)
            self.fill(on, transfer, 99)
            continue_with(self.call("commit", on, transfer=transfer))

        def aborted(number: int) -> int:
            if not model.aborted:
                self.call("abort", on, transfer=self.open_transfer(on, number))
            return self.transfer(model, number, aborted=True)

        def truncate(number: int) -> None:
            self.call("truncate", on, sequence=self.edited, length=max(0, length() - (1, 2, 3, 0, 5, 8, 1, 99)[number]))

        return {
            "create": lambda number: continue_with(self.call("create", on)),
            "append": lambda number: self.append_to(on, self.edited, 1 + number % 4, "uneven"),
            "truncate": truncate,
            "drop": drop,
            "begin": lambda number: self.call("begin", on, length=1 + number % 5, deadline=None if number % 2 else number),
            "arrive": lambda number: self.fill(on, self.open_transfer(on, number), 1 + number),
            "commit": commit,
            "abort": lambda number: self.call("abort", on, transfer=self.open_transfer(on, number)),
            "expire": lambda number: self.call("expire", on, now=number),
            "fence": lambda number: self.call("fence", on, transfer=aborted(number)),
            "write_late": lambda number: self.late(on, aborted(number), number, "uneven"),
            "export": export,
            "release": lambda number: self.call("release", on, handle=self.some_export(on, number)),
        }

    edit_more = edit_again = FamilyStateMachine.edit_in_a_row  # more rules make edits more frequent

    # Steps that rules share.

    def append_to(self, on: int, sequence: int, count: int, kind: str) -> None:
        _, model = self.cache(self.objects.index(on))
        keys, values = make_pair(self.source, (model.layers, count, *model.row), kind)
        self.call("append", on, sequence=sequence, keys=keys, values=values)

    def fill(self, on: int, transfer: int, most: int, kind: str = "uneven") -> None:
        """Let missing rows of a transfer arrive, in at most `most` parts of one layer and position each."""
        _, model = self.cache(self.objects.index(on))
        held = model.open.get(transfer)
        for layer, at in product(range(model.layers), range(held.length if held else 0)):
            missing = [head for head in range(model.row[0]) if held and (layer, at, head) not in held.rows]
            if missing and most and self.going:
                most -= 1
                span = [missing[0], next(head for head in range(missing[0] + 1, model.row[0] + 1) if head not in missing)]
                self.arrive_part(on, transfer, layer, at, 1, span, kind)

    def arrive_part(self, on: int, transfer: int, layer: int, start: int, count: int, heads: list[int], kind: str) -> None:
        _, model = self.cache(self.objects.index(on))
        shape = count, max(0, heads[1] - heads[0]), model.row[1]
        keys, values = make_pair(self.source, shape, kind)
        self.call("arrive", on, transfer=transfer, layer=layer, start=start, heads=heads, keys=keys, values=values)

    def late(self, on: int, transfer: int, number: int, kind: str) -> None:
        """A late write of all positions and heads of one layer."""
        _, model = self.cache(self.objects.index(on))
        held = model.aborted.get(transfer)
        keys, values = make_pair(self.source, (held.length if held else 1, *model.row), kind)
        layer, heads = number % model.layers, [0, model.row[0]]
        self.call("write_late", on, transfer=transfer, layer=layer, start=0, heads=heads, keys=keys, values=values)

    # Rules.

    @precondition(lambda self: self.objects)
    @rule(which=WHICH, index=ANY_INDEX, count=TOKEN_COUNT, kind=row_kinds())
    def append(self, which: int, index: int, count: int, kind: str) -> None:
        on, model = self.cache(which)
        self.append_to(on, self.sequence(model, index), count, kind)

    append_more = append

    @precondition(lambda self: self.objects)
    @rule(which=WHICH, index=ANY_INDEX, wrong=st.integers(0, 5), side=st.integers(0, 2), part=st.booleans())
    def append_wrongly(self, which: int, index: int, wrong: int, side: int, part: bool) -> None:
        on, model = self.cache(which)
        if part:
            keys, values = self.source.wrong_pair((1, *model.row), wrong, side)
            whole = {"layer": 0, "start": 0, "heads": [0, model.row[0]]}
            self.call("arrive", on, transfer=self.transfer(model, index), keys=keys, values=values, **whole)
        else:
            keys, values = self.source.wrong_pair((model.layers, 2, *model.row), wrong, side)
            self.call("append", on, sequence=self.sequence(model, index), keys=keys, values=values)

    @precondition(lambda self: self.objects)
    @rule(which=WHICH, index=ANY_INDEX, count=TOKEN_COUNT)
    def create(self, which: int, index: int, count: int) -> None:
        on, _ = self.cache(which)
        sequence = self.call("create", on)
        if sequence is not None:
            self.append_to(on, sequence, count, "uneven")

    @precondition(lambda self: self.objects)
    @rule(which=WHICH, index=ANY_INDEX, back=TRUNCATION, count=TOKEN_COUNT, kind=row_kinds())
    def truncate(self, which: int, index: int, back: int, count: int, kind: str) -> None:
        on, model = self.cache(which)
        sequence = self.sequence(model, index)
        length = model.sequences[sequence].length if sequence in model.sequences else 0
        self.call("truncate", on, sequence=sequence, length=length - back)
        self.append_to(on, sequence, count, kind)

    @precondition(lambda self: self.objects)
    @rule(which=WHICH, index=ANY_INDEX)
    def drop(self, which: int, index: int) -> None:
        on, model = self.cache(which)
        self.call("drop", on, sequence=self.sequence(model, index))

    @precondition(lambda self: self.objects)
    @rule(which=WHICH, length=LENGTH, deadline=TIME)
    def begin(self, which: int, length: int, deadline: int | None) -> None:
        given = {} if deadline is None else {"deadline": deadline}
        self.call("begin", self.cache(which)[0], length=length, **given)

    begin_more = begin

    @precondition(lambda self: self.objects)
    @rule(which=WHICH, length=st.sampled_from((-1, 10**9, 40)), deadline=st.sampled_from((-1, 3)))
    def begin_wrongly(self, which: int, length: int, deadline: int) -> None:
        self.call("begin", self.cache(which)[0], length=length, deadline=deadline)

    @precondition(lambda self: self.objects)
    @rule(
        which=WHICH, index=ANY_INDEX, layer=st.sampled_from((0, 1, 0, 1, 9)), start=st.integers(0, 5), count=TOKEN_COUNT,
        heads=st.sampled_from(((0, 9), (0, 9), (0, 1), (1, 9), (1, 2), (2, 3), (0, 2), (1, 1))),
        wrong=st.sampled_from(("", "", "", "", "", "", "heads", "tokens")), again=st.sampled_from((0, 0, 1, 2)), kind=row_kinds(),
    )  # fmt: skip
    def arrive(
        self,
        which: int,
        index: int,
        layer: int,
        start: int,
        count: int,
        heads: tuple[int, int],
        wrong: str,
        again: int,
        kind: str,
    ) -> None:
        """A part of any extent, and perhaps another that begins 0 or 1 positions later. Layer 9 does not exist."""
        on, model = self.cache(which)
        transfer = self.open_transfer(on, index, 5)
        length = model.open[transfer].length if transfer in model.open else 3
        start, layer = min(start, length), model.layers if layer == LAST_INDEX else layer % model.layers
        last = min(heads[1], model.row[0]) + (wrong == "heads")
        span, count = [min(heads[0], last), last], min(count, length - start) + (wrong == "tokens")
        self.arrive_part(on, transfer, layer, start, count, span, kind)
        if again:
            start = min(start + again - 1, length)
            self.arrive_part(on, transfer, layer, start, min(count, length - start), [span[0], model.row[0]], kind)

    @precondition(lambda self: self.objects)
    @rule(which=WHICH, index=ANY_INDEX, most=st.sampled_from((99, 1, 2, 99, 5)), kind=row_kinds())
    def arrive_missing(self, which: int, index: int, most: int, kind: str) -> None:
        on, _ = self.cache(which)
        self.fill(on, self.open_transfer(on, index), most, kind)

    @precondition(lambda self: self.objects)
    @rule(
        which=WHICH, index=ANY_INDEX, again=st.sampled_from((0, 0, 1)), fill=st.sampled_from((99, 99, 0, -1)), count=TOKEN_COUNT
    )
    def commit(self, which: int, index: int, again: int, fill: int, count: int) -> None:
        """Commit a transfer: after its missing rows have arrived, as it is (0), or when one head or layer is missing (-1)."""
        on, model = self.cache(which)
        transfer = self.open_transfer(on, index, 4)
        held = model.open.get(transfer)
        if fill < 0 and held and not held.rows:
            by_head = count % 2 and model.row[0] > 1
            for layer in range(model.layers if by_head else model.layers - 1):
                span = [0, model.row[0] - 1] if by_head else [0, model.row[0]]
                self.arrive_part(on, transfer, layer, 0, held.length, span, "uneven")
        self.fill(on, transfer, max(0, fill))
        for _ in range(1 + again):
            sequence = self.call("commit", on, transfer=transfer)
        if sequence is not None:
            self.append_to(on, sequence, count, "uneven")

    commit_more = commit

    @precondition(lambda self: self.objects and len(self.objects) > 1)
    @rule(which=WHICH, index=ANY_INDEX, cut=st.integers(0, 5), head=st.integers(0, 5), layers_first=st.booleans())
    def transfer_between(self, which: int, index: int, cut: int, head: int, layers_first: bool) -> None:
        """Send an export to the other cache, in parts that are divided at a position and at a head."""
        (sender, model), (receiver, other) = self.cache(which), self.cache(which + 1)
        handle = self.some_export(sender, index)
        if handle not in model.exports or model.layers != other.layers or model.row != other.row:
            return
        length, heads = model.exports[handle].length, model.row[0]
        transfer = self.call("begin", receiver, length=length)
        if transfer is None:
            return
        at, split = min(cut, length), min(head, heads)
        parts = list(product(range(model.layers), ([at, length], [0, at]), ([split, heads], [0, split])))
        for layer, tokens, span in parts if layers_first else reversed(parts):
            rows = self.call_quietly("send", sender, handle=handle, layer=layer, tokens=tokens, heads=span)
            if rows is not None and self.going:
                part = {"layer": layer, "start": tokens[0], "heads": span, "keys": rows[0], "values": rows[1]}
                self.call("arrive", receiver, transfer=transfer, **part)
        self.call("commit", receiver, transfer=transfer)

    @precondition(lambda self: self.objects)
    @rule(
        which=WHICH, index=ANY_INDEX, expires=st.sampled_from((None, None, 5, 6, 0, 8)), late=st.sampled_from((0, 1, 1, 2)),
        count=TOKEN_COUNT, fenced=st.sampled_from((True, False, True)), kind=row_kinds(everything=False),
    )  # fmt: skip
    def abort(self, which: int, index: int, expires: int | None, late: int, count: int, fenced: bool, kind: str) -> None:
        """Abort a transfer, or all whose deadline is over; let others allocate blocks; write late; fence."""
        on, model = self.cache(which)
        transfer = self.open_transfer(on, index, 4, deadline=6)
        if expires is None:
            self.call("abort", on, transfer=transfer)
        else:
            self.call("expire", on, now=expires)
        self.append_to(on, self.sequence(model, index), count, "uneven")
        aborted = self.transfer(model, index, aborted=True)
        for number in range(late):
            self.late(on, aborted, number, kind)
        if fenced:
            self.call("fence", on, transfer=aborted)
            self.append_to(on, self.sequence(model, index + 1), count, "uneven")

    @precondition(lambda self: self.objects)
    @rule(which=WHICH, index=ANY_INDEX, name=st.sampled_from(("fence", "write_late", "arrive", "abort")))
    def call_ended(self, which: int, index: int, name: str) -> None:
        """A call on a transfer that may be open, committed, aborted or fenced."""
        on, model = self.cache(which)
        transfer = choose_one(model.ids["transfer"], index)
        if transfer is None:
            return
        if name in ("fence", "abort"):
            self.call(name, on, transfer=transfer)
        else:
            keys, values = make_pair(self.source, (1, *model.row), "counting")
            part = {"layer": 0, "start": 0, "heads": [0, model.row[0]], "keys": keys, "values": values}
            self.call(name, on, transfer=transfer, **part)

    @precondition(lambda self: self.objects)
    @rule(which=WHICH, now=st.sampled_from((6, 5, -1)))
    def expire(self, which: int, now: int) -> None:
        self.call("expire", self.cache(which)[0], now=now)

    @precondition(lambda self: self.objects)
    @rule(
        which=WHICH, index=ANY_INDEX, times=st.sampled_from((1, 1, 2, 3)), count=TOKEN_COUNT,
        then=st.sampled_from(("append", "drop", "truncate", "", "append")),
    )  # fmt: skip
    def export(self, which: int, index: int, times: int, then: str, count: int) -> None:
        """Export a sequence, perhaps several times, then change it."""
        on, model = self.cache(which)
        sequence = self.sequence(model, index)
        for _ in range(times):
            self.call("export", on, sequence=sequence)
        if then == "append":
            self.append_to(on, sequence, count, "uneven")
        elif then == "drop":
            self.call("drop", on, sequence=sequence)
        elif then == "truncate" and sequence in model.sequences:
            self.call("truncate", on, sequence=sequence, length=model.sequences[sequence].length // 2)
            self.append_to(on, sequence, count, "uneven")

    @precondition(lambda self: self.objects)
    @rule(which=WHICH, index=ANY_INDEX)
    def release(self, which: int, index: int) -> None:
        on, _ = self.cache(which)
        self.call("release", on, handle=self.some_export(on, index))

    @precondition(lambda self: self.objects)
    @rule(
        which=WHICH, index=ANY_INDEX, layer=st.sampled_from((0, 1, 0, LAST_INDEX)),
        tokens=st.sampled_from(((0, 2), (1, 3), (2, 2), (1, 99), (2, 1), (-1, 1))),
        heads=st.sampled_from(((0, 1), (1, 2), (1, 3), (0, 99), (-1, 1))),
    )  # fmt: skip
    def send(self, which: int, index: int, layer: int, tokens: tuple[int, int], heads: tuple[int, int]) -> None:
        on, model = self.cache(which)
        layer = model.layers if layer == LAST_INDEX else layer % model.layers
        self.call_quietly("send", on, handle=self.some_export(on, index), layer=layer, tokens=list(tokens), heads=list(heads))


register_error_states(
    "transfer", "ShapeMismatch", "DtypeMismatch", "OutOfBlocks", "SequenceNotFound", "TransferNotFound", "TransferIncomplete",
    "AlreadyArrived", "ExportNotFound", "LayerOutOfRange", "HeadOutOfRange", "PositionOutOfRange",
)  # fmt: skip


def of_transfer(call: ModelCall) -> Owner:
    model: Transfer = call.model
    return (model.open | model.aborted)[call.args["transfer"]]


@state("transfer", "append")
def a_block_that_an_export_holds_is_copied(call: ModelCall) -> bool:
    model: Transfer = call.model
    held = model.sequences[call.args["sequence"]]
    return bool(call.tokens and held.length % model.size and model.is_shared(held.blocks[-1]))


@state("transfer", "append", raising="OutOfBlocks")
def a_copy_lacks_a_block(call: ModelCall) -> bool:
    model: Transfer = call.model
    held = model.sequences[call.args["sequence"]]
    new = max(0, model.blocks_for(held.length + call.tokens) - len(held.blocks))
    return model.layers * new <= model.free


@state("transfer", "append")
def the_last_block_of_a_committed_sequence_is_filled(call: ModelCall) -> bool:
    model: Transfer = call.model
    held = model.sequences[call.args["sequence"]]
    return bool(call.tokens and held.length % model.size and call.args["sequence"] in call.history.reused_buffers)


@state("transfer", "append")
def a_sequence_allocates_while_an_aborted_transfer_waits_for_its_fence(call: ModelCall) -> bool:
    model: Transfer = call.model
    held = model.sequences[call.args["sequence"]]
    return any(each.length for each in model.aborted.values()) and model.blocks_for(held.length + call.tokens) > len(held.blocks)


@state("transfer", "write_late")
def a_late_write_follows_an_allocation(call: ModelCall) -> bool:
    model: Transfer = call.model
    return bool(call.tokens) and any(held.length for held in (model.sequences | model.open).values())


@state("transfer", "commit")
def a_transfer_is_committed_with_a_partly_filled_block(call: ModelCall) -> bool:
    return bool(of_transfer(call).length % call.model.size)


@state("transfer", "commit", raising="TransferIncomplete")
def only_heads_are_missing(call: ModelCall) -> bool:
    model: Transfer = call.model
    held = of_transfer(call)
    places = {row[:2] for row in held.rows}
    return len(places) == model.layers * held.length


@state("transfer", "commit", raising="TransferIncomplete")
def only_a_layer_is_missing(call: ModelCall) -> bool:
    model: Transfer = call.model
    held = of_transfer(call)
    counts = [sum(row[0] == layer for row in held.rows) for layer in range(model.layers)]
    return model.layers > 1 and sorted(counts)[0] < sorted(counts)[1] == held.length * model.row[0]


@state("transfer", "arrive", raising="AlreadyArrived")
def some_rows_of_a_part_are_new(call: ModelCall) -> bool:
    heads, start = range(*call.args["heads"]), call.args["start"]
    part = {(call.args["layer"], start + at, head) for at in range(call.tokens) for head in heads}
    return bool(part - of_transfer(call).rows.keys())


@state("transfer", "arrive")
def a_part_crosses_a_block_and_a_rank(call: ModelCall) -> bool:
    model: Transfer = call.model
    heads, start = call.args["heads"], call.args["start"]
    crosses = start // model.size < (start + call.tokens - 1) // model.size
    return bool(crosses and 1 < heads[1] - heads[0] < model.row[0])


@state("transfer", "expire")
def one_transfer_expires_and_another_stays(call: ModelCall) -> bool:
    return bool(0 < len(call.result) < len(call.model.open))


@state("transfer", "release")
def another_export_still_holds_the_blocks(call: ModelCall) -> bool:
    model: Transfer = call.model
    return any(model.is_shared(block) for block in model.exports[call.args["handle"]].blocks)


@state("transfer", "release")
def an_export_of_a_dropped_sequence_is_released(call: ModelCall) -> bool:
    model: Transfer = call.model
    return any(not model.is_shared(block) for block in model.exports[call.args["handle"]].blocks)


@state("transfer", "fence")
def a_fence_frees_blocks(call: ModelCall) -> bool:
    return bool(of_transfer(call).length)


def note_transfer(call: ModelCall) -> None:
    if call.op == "transfer.commit" and not call.error_kind:
        call.history.reused_buffers.add(call.result)


NOTES["transfer"] = note_transfer
