"""The state machine of the family `paged`."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvref_conformance.families.paged.model import Paged
from kvref_conformance.families.paged.ownership_model import RELEASED, OwnershipState, TableEntry
from kvref_conformance.fuzz.base_machine import (
    ANY_INDEX,
    DAMAGE_KIND,
    LAST_INDEX,
    TOKEN_COUNT,
    FamilyStateMachine,
    choose_one,
    clip_index,
    damage_saved_data,
    make_pair,
)
from kvref_conformance.fuzz.row_generators import row_kinds
from kvref_conformance.fuzz.state_registry import NOTES, ModelCall, register_error_states, state
from kvref_conformance.oracle.formats import PLAIN_FORMATS, SCALED_FORMATS, group_of
from kvref_conformance.oracle.rotary import full_frequencies
from kvref_conformance.testlib.fixtures import supports

GONE = 8  # the index of a dropped sequence
SEQUENCE = st.sampled_from((*(0, 1, 2) * 5, GONE, LAST_INDEX))
BATCH = st.sampled_from((
    (0,), (0, 1), (1, 0), (0, 1, 2), (2, 0, 1), (0, 0), (1, 0, 1), (0, 0, 0), (0, 1, 0, 1), (1, GONE), (0, LAST_INDEX), (),
))  # fmt: skip
POSITIONS = st.sampled_from(((0,), (1, 0), (4, 2, 7), (2, 2), (5, 0), (8, 3, 1), (0, LAST_INDEX), ()))
NOWHERE = 9  # a write at an invalid position
BACK = st.sampled_from((*(0,) * 9, *(1, 2, 3, 4) * 2, -1, NOWHERE))  # number of tokens between the start of a write and the end
# base, layout, and the divisor of the number of pairs that are rotated: with 2 the embedding is partial
ROTATIONS = (100.0, "halves", 1), (10_000.0, "pairs", 1), (2.5, "halves", 2), (2.5, "pairs", 2)
ROTATING = st.sampled_from((*("remove and rotate",) * 4, "fork", "truncate", "append_step", "write"))  # with no read between
DTYPE = st.sampled_from(("float32", "float16", "bfloat16", "int8", "float32", "q4", "float32", "int8_g32_float32"))


def scaled_too(machine: FamilyStateMachine, wanted: str) -> str:
    """Returns the wanted dtype. If it has scales and is not provided, returns another dtype with scales."""
    among = (wanted, *SCALED_FORMATS) if wanted in SCALED_FORMATS else ()
    found = next((each for each in among if supports(machine.subject, "dtype", each)), wanted)
    return machine.format_for(machine.family, "dtype", found) or ""


class PagedStateMachine(FamilyStateMachine):
    family = "paged"

    @initialize(
        blocks=st.sampled_from((6, 7, 9, 12, 5, 24, 0)), size=st.sampled_from((1, 2, 3, 4, 2, 3)),
        layers=st.sampled_from((1, 2, 2)), heads=st.integers(1, 2), dim=st.sampled_from((1, 3, 2, 4)),
        dtype=DTYPE, sequences=st.sampled_from((1, 2, 3, 2)),
    )  # fmt: skip
    def new(self, blocks: int, size: int, layers: int, heads: int, dim: int, dtype: str, sequences: int) -> None:
        dtype = scaled_too(self, dtype)
        dim = max(dim, group_of(dtype))
        self.make_object(num_blocks=blocks, block_size=size, num_layers=layers, num_kv_heads=heads, head_dim=dim, dtype=dtype)
        if self.objects:
            self.shape = self.config["num_kv_heads"], self.config["head_dim"]
            self.layers = self.config["num_layers"]
            self.block_size = int(self.config["block_size"])
            self.stride = max(1, self.block_size // 4)  # tokens per step, larger if blocks must be large
        for _ in range(sequences):
            self.create()

    @property
    def model(self) -> Paged:
        found = self.models[self.objects[0]]
        assert isinstance(found, Paged)
        return found

    def sequence(self, index: int) -> int:
        """Returns the id of a live sequence, or for the last two indices of a dropped and of an unknown one."""
        there = choose_one(self.model.ids - set(self.model.sequences) if index == GONE else self.model.sequences, index)
        return 1000 if there is None or index == LAST_INDEX else there

    def length(self, index: int, layer: int) -> int:
        """Returns the length of a layer of the sequence with this index, or 0 if either does not exist."""
        layers = self.model.sequences.get(self.sequence(index), [])
        return len(layers[layer].tokens) if layer < len(layers) else 0

    def create(self) -> int | None:
        """Creates a sequence, if there can be one more."""
        if self.objects and len(self.model.sequences) < self.subject.size("sequences", 99):
            created: int | None = self.call("create", self.objects[0])
            return created
        return None

    def edits(self, which: int) -> dict[str, Callable[[int], Any]]:
        self.edited = self.chosen(which % 3, full=True)
        if which > 2 and self.edited in self.model.sequences:
            self.fill(self.edited)
        return {
            "create": lambda number: self.continue_with(self.create()),
            "drop": self.drop_in_a_row,
            "fork": self.fork_in_a_row,
            "truncate": self.truncate_in_a_row,
            "release_before": self.release_in_a_row,
            "remove": self.remove_in_a_row,
            "remove and rotate": lambda number: self.remove_in_a_row(number, **self.rotation(number)),
            "load": lambda number: self.call("load", self.objects[0], sequence=self.edited, data=self.saved),
            "ensure_capacity": self.ensure_in_a_row,
            "write": self.write_in_a_row,
            "append": lambda number: self.append_in_a_row(number, step=False),
            "append_step": lambda number: self.append_in_a_row(number, step=True),
        }

    @precondition(lambda self: self.objects and self.model.sequences and self.rotates)
    @rule(which=st.integers(3, 5), picks=st.lists(st.tuples(ROTATING, st.integers(0, 7)), min_size=2, max_size=4))
    def rotate_in_a_row(self, which: int, picks: list[tuple[str, int]]) -> None:
        """Removes tokens and rotates keys, and reads nothing between: a cache that rotates later has to add the rotations."""
        self.make_edits(self.edits(which), picks)

    def fill(self, sequence: int) -> None:
        """Appends tokens to each layer until it has more than two blocks of them, so that edits can begin where a block does."""
        for layer, held in enumerate(self.model.sequences[sequence]):
            length = len(held.tokens)
            if length <= 2 * self.model.size:
                self.put_into(sequence, layer, length, 2 * self.model.size + 1 - length, "uneven")

    def save_before_edits(self) -> Any:
        return self.call_quietly("save", self.objects[0], sequence=self.edited)

    def continue_with(self, sequence: int | None) -> None:
        """Makes the next edits on this sequence, if it was created."""
        self.edited = self.edited if sequence is None else sequence

    def before_end(self, number: int) -> int:
        """Returns a position near the end of the edited sequence, or at the border of one of its last blocks."""
        length, size = self.shortest(self.edited), self.block_size
        if number < 4:
            return max(0, length - number * self.stride)
        return max(0, (length - 1) // size - (number - 5)) * size if number < 7 else 0

    def drop_in_a_row(self, number: int) -> None:
        self.call("drop", self.objects[0], sequence=self.edited)
        self.continue_with(choose_one(self.model.sequences, number))

    def fork_in_a_row(self, number: int) -> None:
        if len(self.model.sequences) < min(4, self.subject.size("sequences", 99)):
            child = self.call("fork", self.objects[0], sequence=self.edited)
            self.continue_with(child if number % 2 else None)

    def truncate_in_a_row(self, number: int) -> None:
        length = min(self.before_end(number), self.shortest(self.edited))
        self.call("truncate", self.objects[0], sequence=self.edited, length=length)

    def release_in_a_row(self, number: int) -> None:
        position = min(self.before_end(number), self.shortest(self.edited))
        self.call("release_before", self.objects[0], sequence=self.edited, position=position)

    @property
    def rotates(self) -> bool:
        """Whether the model covers `remove` with frequencies: not in a format with scales."""
        return self.model.dtype in PLAIN_FORMATS and self.shape[1] > 1

    def rotation(self, number: int) -> dict[str, Any]:
        """Returns arguments of `remove` that rotate keys, if the model covers them."""
        theta, layout, share = ROTATIONS[number % len(ROTATIONS)]
        pairs = self.shape[1] // 2
        frequencies = full_frequencies(self.shape[1], theta)[: max(1, pairs // share)]
        return {"frequencies": frequencies, "layout": layout} if self.rotates else {}

    def remove_in_a_row(self, number: int, **rotation: Any) -> None:
        shortest = self.shortest(self.edited)
        start = max(self.model.first_position(self.edited), min(shortest, self.before_end(number)) - number % 3)
        if start <= shortest:
            stop = min(shortest, start + 1 + number % 2)
            self.call("remove", self.objects[0], sequence=self.edited, start=start, stop=stop, **rotation)

    def ensure_in_a_row(self, number: int) -> None:
        longest = max((len(layer.tokens) for layer in self.model.sequences.get(self.edited, [])), default=0)
        self.call("ensure_capacity", self.objects[0], sequence=self.edited, num_tokens=longest + number * self.stride)

    def write_in_a_row(self, number: int) -> None:
        layer, layers = number % self.layers, self.model.sequences.get(self.edited, [])
        length = len(layers[layer].tokens) if layers else 0
        start = max(0, length - number // 2 * self.stride)
        self.put_into(self.edited, layer, start, (1 + number % 3) * self.stride, "uneven")

    def append_in_a_row(self, number: int, step: bool) -> None:
        """Appends a token to the edited sequence, or to it and to another one."""
        other = choose_one(set(self.model.sequences) - {self.edited}, number) if number > 4 else None
        sequences = [self.edited] if other is None else [other, self.edited]
        keys, values = make_pair(self.source, (self.layers, len(sequences), *self.shape), "uneven")
        if step:
            self.call("append_step", self.objects[0], sequences=sequences, keys=keys, values=values)
        else:
            layer = number % self.layers
            self.call("append", self.objects[0], sequences=sequences, layer=layer, keys=keys[layer], values=values[layer])

    @precondition(lambda self: self.objects)
    @rule(which=SEQUENCE, layer=ANY_INDEX, back=BACK, count=TOKEN_COUNT, kind=row_kinds())
    def write(self, which: int, layer: int, back: int, count: int, kind: str) -> None:
        layer = clip_index(layer, self.layers)
        start = max(0, self.length(which, layer) - back) if back != NOWHERE else -1  # at, before or after the end
        self.put(which, layer, start, count * self.stride, kind)

    write_more = write  # a second rule makes writes more frequent, which most bugs need

    def put(self, which: int, layer: int, start: int, count: int, kind: str) -> None:
        self.put_into(self.sequence(which), layer, start, count, kind)

    def put_into(self, sequence: int, layer: int, start: int, count: int, kind: str) -> None:
        keys, values = make_pair(self.source, (count, *self.shape), kind)
        self.call("write", self.objects[0], sequence=sequence, layer=layer, start=start, keys=keys, values=values)

    @precondition(lambda self: self.objects)
    @rule(which=ANY_INDEX, layer=ANY_INDEX, start=st.integers(0, 9), count=TOKEN_COUNT, kind=row_kinds())
    def overwrite(self, which: int, layer: int, start: int, count: int, kind: str) -> None:
        """Overwrites existing tokens only."""
        layer %= self.layers
        if length := self.length(which, layer):
            start = start * self.stride % length
            self.put(which, layer, start, min(count * self.stride, length - start), kind)

    @precondition(lambda self: self.objects)
    @rule(which=SEQUENCE, wrong=st.integers(0, 5), side=st.integers(0, 2))
    def write_wrongly(self, which: int, wrong: int, side: int) -> None:
        keys, values = self.source.wrong_pair((2, *self.shape), wrong, side)
        self.call("write", self.objects[0], sequence=self.sequence(which), layer=0, start=0, keys=keys, values=values)

    @precondition(lambda self: self.objects)
    @rule(which=BATCH, layer=ANY_INDEX, kind=row_kinds(), step=st.booleans())
    def append(self, which: tuple[int, ...], layer: int, kind: str, step: bool) -> None:
        sequences = [self.sequence(each) for each in which]
        if step:
            keys, values = make_pair(self.source, (self.layers, len(which), *self.shape), kind)
            self.call("append_step", self.objects[0], sequences=sequences, keys=keys, values=values)
        else:
            keys, values = make_pair(self.source, (len(which), *self.shape), kind)
            there = clip_index(layer, self.layers)
            self.call("append", self.objects[0], sequences=sequences, layer=there, keys=keys, values=values)
        self.call_quietly("gather_batch", self.objects[0], sequences=sequences, layer=clip_index(layer, self.layers))

    append_more = append

    @precondition(lambda self: self.objects)
    @rule(which=BATCH, layer=ANY_INDEX)
    def read_batch(self, which: tuple[int, ...], layer: int) -> None:
        batch = {"sequences": [self.sequence(each) for each in which], "layer": clip_index(layer, self.layers)}
        for name in ("gather_batch", "lengths"):
            self.call_quietly(name, self.objects[0], **batch)
        self.call("block_tables", self.objects[0], **batch)

    @precondition(lambda self: self.objects)
    @rule(
        which=SEQUENCE,
        layer=ANY_INDEX,
        tokens=st.sampled_from((4, 8, 12, 3, 6, 0, -1)),
        start=st.integers(-1, 3),
        count=st.integers(-1, 5),
    )
    def ensure_capacity(self, which: int, layer: int, tokens: int, start: int, count: int) -> None:
        sequence, layer = self.sequence(which), clip_index(layer, self.layers)
        self.call("ensure_capacity", self.objects[0], sequence=sequence, num_tokens=tokens * self.stride)
        self.call_quietly("slot_mapping", self.objects[0], sequence=sequence, layer=layer, start=start, count=count)

    @precondition(lambda self: self.objects)
    @rule(which=SEQUENCE, layer=ANY_INDEX, count=TOKEN_COUNT, kind=row_kinds(), spare=st.sampled_from((0, 0, 0, 4)))
    def drop(self, which: int, layer: int, count: int, kind: str, spare: int) -> None:
        """Drops a sequence, if possible one with tokens, and writes to a new one, which reuses its blocks."""
        sequence = self.chosen(which)
        if spare and sequence in self.model.sequences:
            longest = max(len(each.tokens) for each in self.model.sequences[sequence])
            self.call("ensure_capacity", self.objects[0], sequence=sequence, num_tokens=longest + spare * self.stride)
        self.call("drop", self.objects[0], sequence=sequence)
        self.create()
        self.put(len(self.model.sequences) - 1, clip_index(layer, self.layers), 0, count * self.stride, kind)

    @precondition(lambda self: self.objects and self.model.sequences)
    @rule(
        which=SEQUENCE,
        layer=ANY_INDEX,
        who=st.sampled_from((1, 0, 2, 3, 4, 5, 1, 4)),
        back=st.sampled_from((0, 1, 2, 1, 4, 9)),
        count=TOKEN_COUNT,
        kind=row_kinds(),
    )
    def fork(self, which: int, layer: int, who: int, back: int, count: int, kind: str) -> None:
        """Forks a sequence, if possible one with tokens, and continues with the child, the parent, or both, or drops both."""
        if len(self.model.sequences) >= min(4, self.subject.size("sequences", 99)):
            return
        sequence, layer = self.chosen(which, full=True), clip_index(layer, self.layers)
        if who == 4 and sequence in self.model.sequences:  # so that every layer has a token to truncate
            keys, values = make_pair(self.source, (self.layers, 1, *self.shape), kind)
            self.call("append_step", self.objects[0], sequences=[sequence], keys=keys, values=values)
        child = self.call("fork", self.objects[0], sequence=sequence)
        if child is None:
            return
        one = child if who % 2 else sequence
        if who == 2:
            if left := self.model.free % self.layers:  # reserve all other blocks: some copies fit, others do not
                blocks = -(-self.shortest(sequence) // self.model.size) + (self.model.free - left) // self.layers
                self.call("ensure_capacity", self.objects[0], sequence=sequence, num_tokens=blocks * self.model.size)
            keys, values = make_pair(self.source, (self.layers, 2, *self.shape), kind)
            self.call("append_step", self.objects[0], sequences=[child, sequence], keys=keys, values=values)
        elif who in (3, 4):
            self.cut(one, back, count, remove=who == 3)
        elif who == 5:
            self.call("drop", self.objects[0], sequence=sequence)
            self.call("drop", self.objects[0], sequence=child)
        elif layer < self.layers:
            length = len(self.model.sequences[sequence][layer].tokens)
            self.put_into(one, layer, max(0, length - back * self.stride), count * self.stride, kind)

    fork_more = fork

    @precondition(lambda self: self.objects)
    @rule(
        which=SEQUENCE,
        back=st.sampled_from((1, 2, 3, 5, 0, -1)),
        count=st.sampled_from((1, 2, 3, 4, 0)),
        remove=st.booleans(),
        rotation=st.sampled_from((None, *range(len(ROTATIONS)))),
    )
    def edit(self, which: int, back: int, count: int, remove: bool, rotation: int | None) -> None:
        self.cut(self.chosen(which, full=True), back, count, remove, rotation)

    @precondition(lambda self: self.objects)
    @rule(
        which=SEQUENCE,
        into=SEQUENCE,
        layer=ANY_INDEX,
        between=st.sampled_from((0, 1, 2, 3)),
        damage=DAMAGE_KIND,
        kind=row_kinds(),
    )
    def move(self, which: int, into: int, layer: int, between: int, damage: int, kind: str) -> None:
        """Saves a sequence, changes or drops it, and loads the file into it or another."""
        sequence, layer = self.chosen(which), clip_index(layer, self.layers)
        data = self.call("save", self.objects[0], sequence=sequence)
        if data is None:
            return
        if between == 1:
            self.put_into(sequence, layer, 0, self.stride, kind)
        elif between == 2:
            self.cut(sequence, 1, 1, remove=False)
        elif between == 3:
            self.call("drop", self.objects[0], sequence=sequence)
            self.create()
        self.call("load", self.objects[0], sequence=self.sequence(into), data=damage_saved_data(data, damage))

    @precondition(lambda self: self.objects)
    @rule(which=SEQUENCE, back=st.sampled_from((0, 1, 2, 3, 5, -1)))
    def release_before(self, which: int, back: int) -> None:
        """Frees the blocks before a window of `back` steps. A negative number makes the position invalid."""
        sequence = self.chosen(which, full=True)
        position = max(0, self.shortest(sequence) - back * self.stride)
        self.call("release_before", self.objects[0], sequence=sequence, position=position)

    def cut(self, sequence: int, back: int, count: int, remove: bool, rotation: int | None = None) -> None:
        """Truncates a sequence `back` steps before its end, or removes `count` steps from there on. Arguments can be invalid."""
        shortest = self.shortest(sequence)
        start = max(0, shortest - back * self.stride) if back < 9 else -1
        if not remove:
            self.call("truncate", self.objects[0], sequence=sequence, length=start)
        elif start < 0 or start >= self.model.first_position(sequence):  # at a released position it may raise or not
            stop = start + count * self.stride
            stop = stop if back < 0 or back == 9 else min(stop, shortest)
            args = {} if rotation is None else self.rotation(rotation)
            self.call("remove", self.objects[0], sequence=sequence, start=start, stop=stop, **args)

    def shortest(self, sequence: int) -> int:
        """Returns the length of the shortest layer of a sequence, 0 if it does not exist."""
        return min((len(layer.tokens) for layer in self.model.sequences.get(sequence, [])), default=0)

    def chosen(self, which: int, full: bool = False) -> int:
        """Returns a sequence with tokens if there is one; full: with tokens in every layer."""
        wanted = {id for id, layers in self.model.sequences.items() if (all if full else any)(each.tokens for each in layers)}
        found = choose_one(wanted, which) if which < GONE else None
        if found is None and full:
            return self.chosen(which)
        return self.sequence(which) if found is None else found

    @precondition(lambda self: self.objects)
    @rule(which=SEQUENCE, layer=ANY_INDEX, positions=POSITIONS, group=st.integers(1, 2), kind=row_kinds(everything=False))
    def read(self, which: int, layer: int, positions: tuple[int, ...], group: int, kind: str) -> None:
        sequence, layer = self.chosen(which), clip_index(layer, self.layers)
        tokens = [layer.tokens for layer in self.model.sequences.get(sequence, [])]
        length = len(tokens[layer]) if layer < len(tokens) else 0
        there = [clip_index(position, length) for position in positions]
        self.call_quietly("read", self.objects[0], sequence=sequence, layer=layer, positions=there)
        self.call_quietly("length", self.objects[0], sequence=sequence, layer=layer)
        query = self.source.rows((1, self.shape[0] * self.subject.size("group_size", group), self.shape[1]), kind)
        self.call("attend", self.objects[0], sequence=sequence, layer=layer, query=query, scale=0.5)


# The states of the paged cache that random call sequences should reach, because bugs depend on them.

register_error_states(
    "paged", "SequenceNotFound", "LayerOutOfRange", "PositionOutOfRange", "ShapeMismatch", "DtypeMismatch", "OutOfBlocks",
)  # fmt: skip


def lengths(call: ModelCall, sequence: int | None = None) -> list[int]:
    """Returns the length of each layer of a sequence."""
    model: Paged = call.model
    return [len(layer.tokens) for layer in model.sequences[call.args["sequence"] if sequence is None else sequence]]


def writing(call: ModelCall) -> tuple[int, int, int, int]:
    """Returns the start and end of a write, the length before it, and the block size."""
    start = call.args["start"]
    return start, start + call.tokens, lengths(call)[call.args["layer"]], call.model.size


def allocates_blocks(call: ModelCall) -> bool:
    """Returns whether a write or ensure_capacity allocates blocks."""
    end = call.args["num_tokens"] if call.op == "paged.ensure_capacity" else writing(call)[1]
    return bool(-(-end // call.model.size) > call.model.blocks[call.args["sequence"]])


@state("paged", "drop")
def a_dropped_sequence_has_a_partly_filled_last_block(call: ModelCall) -> bool:
    return any(length % call.model.size for length in lengths(call))


@state("paged", "drop")
def a_dropped_sequence_has_several_blocks_a_layer(call: ModelCall) -> bool:
    return bool(max(lengths(call)) > call.model.size)


@state("paged", "drop")
def a_dropped_sequence_has_layers_of_different_length(call: ModelCall) -> bool:
    return len(set(lengths(call))) > 1


@state("paged", "drop")
def a_dropped_sequence_holds_more_blocks_than_it_filled(call: ModelCall) -> bool:
    filled = -(-max(lengths(call)) // call.model.size)
    return bool(0 < filled < call.model.blocks[call.args["sequence"]])


@state("paged", "drop")
def a_drop_leaves_another_sequence_with_tokens(call: ModelCall) -> bool:
    others = set(call.model.sequences) - {call.args["sequence"]}
    return bool(any(lengths(call)) and any(any(lengths(call, other)) for other in others))


@state("paged", "write", "append", "append_step", "drop", "ensure_capacity", "read", "slot_mapping", raising="SequenceNotFound")
def a_dropped_sequence_is_used_again(call: ModelCall) -> bool:
    named = call.args["sequences"] if "sequences" in call.args else [call.args["sequence"]]
    return any(each in call.model.ids and each not in call.model.sequences for each in named)


def reused(call: ModelCall) -> tuple[list[int], int]:
    """Returns the blocks of the gathered tokens, and the number of tokens."""
    sequence, layer = call.args["sequence"], call.args["layer"]
    length = len(call.model.sequences[sequence][layer].tokens)
    return (call.model.table(sequence, layer) or [])[: -(-length // call.model.size)], length


@state("paged", "gather")
def a_block_of_a_dropped_sequence_is_read_by_another(call: ModelCall) -> bool:
    return not call.history.freed_blocks.isdisjoint(reused(call)[0])


@state("paged", "gather")
def a_reused_block_is_partly_filled(call: ModelCall) -> bool:
    table, length = reused(call)
    return bool(length % call.model.size) and table[-1:] != [] and table[-1] in call.history.freed_blocks


@state("paged", "write")
def tokens_are_overwritten_inside_a_partly_filled_block(call: ModelCall) -> bool:
    start, end, length, size = writing(call)
    return start < end <= length and bool(length % size) and start // size == length // size


@state("paged", "write")
def tokens_are_overwritten_across_a_block_border(call: ModelCall) -> bool:
    start, end, length, size = writing(call)
    return start < end <= length and start // size < (end - 1) // size


@state("paged", "write")
def a_write_overwrites_tokens_and_goes_past_the_end(call: ModelCall) -> bool:
    start, end, length, _ = writing(call)
    return start < length < end


@state("paged", "write")
def a_write_starts_in_a_partly_filled_block_and_ends_in_another(call: ModelCall) -> bool:
    start, end, length, size = writing(call)
    return start == length and bool(length % size) and (end - 1) // size > length // size


@state("paged", "write")
def a_write_fills_a_block_that_was_begun(call: ModelCall) -> bool:
    start, end, length, size = writing(call)
    return start == length < end and bool(length % size) and end % size == 0


@state("paged", "write")
def tokens_are_written_into_a_block_that_was_reserved(call: ModelCall) -> bool:
    _, end, length, size = writing(call)
    return end > length and -(-length // size) < -(-end // size) <= call.model.blocks[call.args["sequence"]]


@state("paged", "write", raising="OutOfBlocks")
def a_sequence_with_tokens_runs_out_of_blocks_while_some_are_free(call: ModelCall) -> bool:
    return bool(call.model.free and any(lengths(call)))


@state("paged", "append", "append_step", raising="OutOfBlocks")
def a_batch_runs_out_of_blocks_while_some_are_free(call: ModelCall) -> bool:
    return bool(call.model.free and len(call.args["sequences"]) > 1)


@state("paged", "write", "append", "append_step")
def tokens_come_after_blocks_ran_out(call: ModelCall) -> bool:
    return call.tokens > 0 and any("runs out of blocks" in name for name in call.history.reached)


@state("paged", "write", "ensure_capacity")
def sequences_take_blocks_in_turn(call: ModelCall) -> bool:
    sequence, takers = call.args["sequence"], call.history.allocating_sequences
    return allocates_blocks(call) and sequence in takers and takers[-1] != sequence


@state("paged", "num_free_blocks")
def every_block_is_in_use(call: ModelCall) -> bool:
    return bool(call.model.total and not call.model.free)


@state("paged", "gather")
def layers_have_tokens_and_different_lengths(call: ModelCall) -> bool:
    return min(lengths(call)) > 0 and len(set(lengths(call))) > 1


@state("paged", "append", "append_step")
def a_batch_names_a_sequence_twice(call: ModelCall) -> bool:
    return len(set(call.args["sequences"])) < len(call.args["sequences"])


@state("paged", "append", "append_step")
def a_batch_names_a_sequence_three_times(call: ModelCall) -> bool:
    return max(Counter(call.args["sequences"]).values(), default=0) == 3


@state("paged", "append", "append_step")
def a_batch_names_two_sequences_twice(call: ModelCall) -> bool:
    return list(Counter(call.args["sequences"]).values()) == [2, 2]


@state("paged", "append", "append_step")
def a_batch_has_sequences_of_different_length(call: ModelCall) -> bool:
    return len({tuple(lengths(call, sequence)) for sequence in call.args["sequences"]}) > 1


@state("paged", "append_step")
def a_step_goes_to_layers_of_different_length(call: ModelCall) -> bool:
    return any(len(set(lengths(call, sequence))) > 1 for sequence in call.args["sequences"])


@state("paged", "append", "append_step")
def a_batch_takes_a_block_for_some_of_its_sequences(call: ModelCall) -> bool:
    layers = slice(call.args["layer"], call.args["layer"] + 1) if "layer" in call.args else slice(None)
    size, blocks = call.model.size, call.model.blocks
    more = {max(lengths(call, sequence)[layers]) // size >= blocks[sequence] for sequence in call.args["sequences"]}
    return len(more) > 1


@state("paged", "gather_batch")
def sequences_of_different_length_are_read_as_a_batch(call: ModelCall) -> bool:
    return len({lengths(call, sequence)[call.args["layer"]] for sequence in call.args["sequences"]} - {0}) > 1


@state("paged", "gather_batch")
def an_empty_sequence_is_read_in_a_batch_with_tokens(call: ModelCall) -> bool:
    counts = [lengths(call, sequence)[call.args["layer"]] for sequence in call.args["sequences"]]
    return min(counts, default=0) == 0 < max(counts, default=0)


@state("paged", "read")
def tokens_of_several_blocks_are_read_out_of_order(call: ModelCall) -> bool:
    positions, size = call.args["positions"], call.model.size
    return positions != sorted(positions) and len({position // size for position in positions}) > 1


@state("paged", "attend")
def attention_goes_over_several_blocks(call: ModelCall) -> bool:
    return bool(lengths(call)[call.args["layer"]] > call.model.size)


def note_paged(call: ModelCall) -> None:
    if call.error_kind:
        return
    if call.op == "paged.drop":
        sequence = call.args["sequence"]
        for number, layer in enumerate(call.model.sequences[sequence]):
            table = call.model.table(sequence, number) or []
            call.history.freed_blocks |= {*table[: -(-len(layer.tokens) // call.model.size)]} - {RELEASED}
    elif call.op in ("paged.write", "paged.ensure_capacity") and allocates_blocks(call):
        call.history.allocating_sequences.append(call.args["sequence"])


NOTES["paged"] = note_paged


# The states of sequences that share blocks that random call sequences should reach, because bugs depend on them.

WRITES = "write", "append", "append_step"


def held(call: ModelCall) -> OwnershipState:
    model: Paged = call.model
    return model.ways[0]


def places(call: ModelCall) -> list[TableEntry]:
    """Returns the existing table entries that a call writes to."""
    model, args = call.model, call.args
    if call.op == "paged.write":
        start, stop = args["start"], args["start"] + call.tokens
        spans: Iterable[tuple[int, int, int, int]] = [(args["sequence"], args["layer"], start, stop)] if start < stop else []
    else:
        layers = [args["layer"]] if "layer" in args else range(model.layers)
        named = [(sequence, layer) for sequence in args["sequences"] for layer in layers]
        lengths = [len(model.sequences[sequence][layer].tokens) for sequence, layer in named]
        spans = [(*where, length, length + 1) for where, length in zip(named, lengths, strict=True)]
    return [
        (sequence, layer, entry)
        for sequence, layer, start, stop in spans
        for entry in range(start // model.size, -(-stop // model.size))
        if held(call).at((sequence, layer, entry)) is not None
    ]


def copied(call: ModelCall) -> dict[int, list[TableEntry]]:
    return {name: writers for name, (writers, _) in held(call).to_copy(places(call)).items()}


def youngest(call: ModelCall, writers: list[TableEntry]) -> bool:
    """Returns whether the writing sequence is a fork: it was created after another one that lists the block."""
    sequence, layer, entry = writers[0]
    name = held(call).at(writers[0])
    return any(each < sequence and held(call).at((each, layer, entry)) == name for each in call.model.sequences)


@state("paged", "write")
def a_fork_writes_to_a_shared_block(call: ModelCall) -> bool:
    return any(youngest(call, writers) for writers in copied(call).values())


@state("paged", "write")
def a_parent_writes_to_a_shared_block(call: ModelCall) -> bool:
    return any(not youngest(call, writers) for writers in copied(call).values())


@state("paged", "append", "append_step")
def two_sharers_of_a_block_write_to_it_in_one_batch(call: ModelCall) -> bool:
    return any(len(writers) > 1 for writers in copied(call).values())


@state("paged", "fork")
def a_fork_is_forked(call: ModelCall) -> bool:
    return bool(call.model.kin[call.args["sequence"]] != call.args["sequence"])


@state("paged", "fork")
def an_empty_sequence_is_forked(call: ModelCall) -> bool:
    return not any(layer.tokens for layer in call.model.sequences[call.args["sequence"]])


@state("paged", "fork")
def a_sequence_with_a_partly_filled_block_is_forked(call: ModelCall) -> bool:
    return any(len(layer.tokens) % call.model.size for layer in call.model.sequences[call.args["sequence"]])


def shares(call: ModelCall) -> bool:
    """Returns whether the sequence of a call shares a block."""
    listed = held(call).references()
    return any(listed[name] > 1 for entry in held(call).tables[call.args["sequence"]] for name in entry)


@state("paged", "drop")
def one_of_several_sharers_goes(call: ModelCall) -> bool:
    return shares(call)


@state("paged", "drop")
def the_last_sharer_goes(call: ModelCall) -> bool:
    model, sequence = call.model, call.args["sequence"]
    alone = not any(each != sequence and model.kin[each] == model.kin[sequence] for each in model.sequences)
    return alone and list(model.kin.values()).count(model.kin[sequence]) > 1 and not shares(call)


@state("paged", *WRITES, raising="OutOfBlocks")
def there_is_no_room_for_a_copy(call: ModelCall) -> bool:
    return bool(copied(call))


@state("paged", *WRITES, raising="OutOfBlocks")
def there_is_no_room_for_all_copies_while_blocks_are_free(call: ModelCall) -> bool:
    return bool(copied(call)) and call.model.free > 0


@state("paged", "truncate")
def a_sequence_is_cut_inside_a_block_that_it_shares(call: ModelCall) -> bool:
    length = call.args["length"]
    return shares(call) and length % call.model.size != 0


@state("paged", "truncate")
def a_sequence_with_tokens_is_cut_to_nothing(call: ModelCall) -> bool:
    return call.args["length"] == 0 and bool(held(call).tables[call.args["sequence"]])
