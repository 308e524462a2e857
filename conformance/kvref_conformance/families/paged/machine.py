"""The state machine of the family `paged`."""

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvref_conformance.checking.setup import takes
from kvref_conformance.families.paged.model import Paged
from kvref_conformance.oracle.formats import SCALED, group_of
from kvref_conformance.searching.machine import ANY, COUNT, DAMAGE, LAST, Machine, damaged, one_of, pair, within
from kvref_conformance.searching.rows import kinds

GONE = 8  # the index of a dropped sequence
SEQUENCE = st.sampled_from((*(0, 1, 2) * 5, GONE, LAST))
BATCH = st.sampled_from((
    (0,), (0, 1), (1, 0), (0, 1, 2), (2, 0, 1), (0, 0), (1, 0, 1), (0, 0, 0), (0, 1, 0, 1), (1, GONE), (0, LAST), (),
))  # fmt: skip
POSITIONS = st.sampled_from(((0,), (1, 0), (4, 2, 7), (2, 2), (5, 0), (8, 3, 1), (0, LAST), ()))
NOWHERE = 9  # a write at an invalid position
BACK = st.sampled_from((*(0,) * 9, *(1, 2, 3, 4) * 2, -1, NOWHERE))  # number of tokens between the start of a write and the end
DTYPE = st.sampled_from(("float32", "float16", "bfloat16", "int8", "float32", "q4", "float32", "int8_g32_float32"))


def scaled_too(machine: Machine, wanted: str) -> str:
    """Returns the wanted dtype. If it has scales and is not provided, returns another dtype with scales."""
    among = (wanted, *SCALED) if wanted in SCALED else ()
    found = next((each for each in among if takes(machine.subject, "dtype", each)), wanted)
    return machine.format_for(machine.family, "dtype", found) or ""


class PagedMachine(Machine):
    family = "paged"

    @initialize(
        blocks=st.sampled_from((6, 7, 9, 12, 5, 24, 0)), size=st.sampled_from((1, 2, 3, 4, 2, 3)),
        layers=st.sampled_from((1, 2, 2)), heads=st.integers(1, 2), dim=st.sampled_from((1, 3)),
        dtype=DTYPE, sequences=st.sampled_from((1, 2, 3, 2)),
    )  # fmt: skip
    def new(self, blocks: int, size: int, layers: int, heads: int, dim: int, dtype: str, sequences: int) -> None:
        dtype = scaled_too(self, dtype)
        dim = max(dim, group_of(dtype))
        self.make(num_blocks=blocks, block_size=size, num_layers=layers, num_kv_heads=heads, head_dim=dim, dtype=dtype)
        if self.objects:
            self.shape = self.config["num_kv_heads"], self.config["head_dim"]
            self.layers = self.config["num_layers"]
            self.stride = max(1, self.config["block_size"] // 4)  # tokens per step, larger if blocks must be large
        for _ in range(sequences):
            self.create()

    @property
    def model(self) -> Paged:
        found = self.witness.models[self.objects[0]]
        assert isinstance(found, Paged)
        return found

    def sequence(self, index: int) -> int:
        """Returns the id of a live sequence, or for the last two indices of a dropped and of an unknown one."""
        there = one_of(self.model.ids - set(self.model.sequences) if index == GONE else self.model.sequences, index)
        return 1000 if there is None or index == LAST else there

    def length(self, index: int, layer: int) -> int:
        """Returns the length of a layer of the sequence with this index, or 0 if either does not exist."""
        layers = self.model.sequences.get(self.sequence(index), [])
        return len(layers[layer].tokens) if layer < len(layers) else 0

    def create(self) -> None:
        if self.objects and len(self.model.sequences) < self.subject.size("sequences", 99):
            self.call("create", self.objects[0])

    @precondition(lambda self: self.objects)
    @rule(which=SEQUENCE, layer=ANY, back=BACK, count=COUNT, kind=kinds())
    def write(self, which: int, layer: int, back: int, count: int, kind: str) -> None:
        layer = within(layer, self.layers)
        start = max(0, self.length(which, layer) - back) if back != NOWHERE else -1  # at, before or after the end
        self.put(which, layer, start, count * self.stride, kind)

    write_more = write  # a second rule makes writes more frequent, which most bugs need

    def put(self, which: int, layer: int, start: int, count: int, kind: str) -> None:
        self.put_into(self.sequence(which), layer, start, count, kind)

    def put_into(self, sequence: int, layer: int, start: int, count: int, kind: str) -> None:
        keys, values = pair(self.source, (count, *self.shape), kind)
        self.call("write", self.objects[0], sequence=sequence, layer=layer, start=start, keys=keys, values=values)

    @precondition(lambda self: self.objects)
    @rule(which=ANY, layer=ANY, start=st.integers(0, 9), count=COUNT, kind=kinds())
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
    @rule(which=BATCH, layer=ANY, kind=kinds(), step=st.booleans())
    def append(self, which: tuple[int, ...], layer: int, kind: str, step: bool) -> None:
        sequences = [self.sequence(each) for each in which]
        if step:
            keys, values = pair(self.source, (self.layers, len(which), *self.shape), kind)
            self.call("append_step", self.objects[0], sequences=sequences, keys=keys, values=values)
        else:
            keys, values = pair(self.source, (len(which), *self.shape), kind)
            there = within(layer, self.layers)
            self.call("append", self.objects[0], sequences=sequences, layer=there, keys=keys, values=values)
        self.ask("gather_batch", self.objects[0], sequences=sequences, layer=within(layer, self.layers))

    append_more = append

    @precondition(lambda self: self.objects)
    @rule(which=BATCH, layer=ANY)
    def read_batch(self, which: tuple[int, ...], layer: int) -> None:
        batch = {"sequences": [self.sequence(each) for each in which], "layer": within(layer, self.layers)}
        for name in ("gather_batch", "lengths"):
            self.ask(name, self.objects[0], **batch)
        self.call("block_tables", self.objects[0], **batch)

    @precondition(lambda self: self.objects)
    @rule(
        which=SEQUENCE,
        layer=ANY,
        tokens=st.sampled_from((4, 8, 12, 3, 6, 0, -1)),
        start=st.integers(-1, 3),
        count=st.integers(-1, 5),
    )
    def ensure_capacity(self, which: int, layer: int, tokens: int, start: int, count: int) -> None:
        sequence, layer = self.sequence(which), within(layer, self.layers)
        self.call("ensure_capacity", self.objects[0], sequence=sequence, num_tokens=tokens * self.stride)
        self.ask("slot_mapping", self.objects[0], sequence=sequence, layer=layer, start=start, count=count)

    @precondition(lambda self: self.objects)
    @rule(which=SEQUENCE, layer=ANY, count=COUNT, kind=kinds(), spare=st.sampled_from((0, 0, 0, 4)))
    def drop(self, which: int, layer: int, count: int, kind: str, spare: int) -> None:
        """Drops a sequence, if possible one with tokens, and writes to a new one, which reuses its blocks."""
        sequence = self.chosen(which)
        if spare and sequence in self.model.sequences:
            longest = max(len(each.tokens) for each in self.model.sequences[sequence])
            self.call("ensure_capacity", self.objects[0], sequence=sequence, num_tokens=longest + spare * self.stride)
        self.call("drop", self.objects[0], sequence=sequence)
        self.create()
        self.put(len(self.model.sequences) - 1, within(layer, self.layers), 0, count * self.stride, kind)

    @precondition(lambda self: self.objects and self.model.sequences)
    @rule(
        which=SEQUENCE,
        layer=ANY,
        who=st.sampled_from((0, 1, 2, 1, 3, 4)),
        back=st.sampled_from((0, 1, 2, 4, 9)),
        count=COUNT,
        kind=kinds(),
    )
    def fork(self, which: int, layer: int, who: int, back: int, count: int, kind: str) -> None:
        """Forks a sequence, if possible one with tokens, and continues with the child, the parent, or both."""
        if len(self.model.sequences) >= min(4, self.subject.size("sequences", 99)):
            return
        sequence, layer = self.chosen(which, full=True), within(layer, self.layers)
        if who == 4 and sequence in self.model.sequences:  # so that every layer has a token to truncate
            keys, values = pair(self.source, (self.layers, 1, *self.shape), kind)
            self.call("append_step", self.objects[0], sequences=[sequence], keys=keys, values=values)
        child = self.call("fork", self.objects[0], sequence=sequence)
        if child is None:
            return
        one = child if who % 2 else sequence
        if who == 2:
            keys, values = pair(self.source, (self.layers, 2, *self.shape), kind)
            self.call("append_step", self.objects[0], sequences=[child, sequence], keys=keys, values=values)
        elif who in (3, 4):
            self.cut(one, back, count, remove=who == 3)
        elif layer < self.layers:
            length = len(self.model.sequences[sequence][layer].tokens)
            self.put_into(one, layer, max(0, length - back * self.stride), count * self.stride, kind)

    @precondition(lambda self: self.objects)
    @rule(which=SEQUENCE, back=st.sampled_from((1, 2, 3, 5, 0, -1)), count=st.sampled_from((1, 2, 3, 4, 0)), remove=st.booleans())
    def edit(self, which: int, back: int, count: int, remove: bool) -> None:
        self.cut(self.chosen(which, full=True), back, count, remove)

    @precondition(lambda self: self.objects)
    @rule(which=SEQUENCE, into=SEQUENCE, layer=ANY, between=st.sampled_from((0, 1, 2, 3)), damage=DAMAGE, kind=kinds())
    def move(self, which: int, into: int, layer: int, between: int, damage: int, kind: str) -> None:
        """Saves a sequence, changes or drops it, and loads the file into it or another."""
        sequence, layer = self.chosen(which), within(layer, self.layers)
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
        self.call("load", self.objects[0], sequence=self.sequence(into), data=damaged(data, damage))

    def cut(self, sequence: int, back: int, count: int, remove: bool) -> None:
        """Truncates a sequence `back` steps before its end, or removes `count` steps from there on. Arguments can be invalid."""
        shortest = min((len(layer.tokens) for layer in self.model.sequences.get(sequence, [])), default=0)
        start = max(0, shortest - back * self.stride) if back < 9 else -1
        if not remove:
            self.call("truncate", self.objects[0], sequence=sequence, length=start)
        else:
            stop = start + count * self.stride
            stop = stop if back < 0 or back == 9 else min(stop, shortest)
            self.call("remove", self.objects[0], sequence=sequence, start=start, stop=stop)

    def chosen(self, which: int, full: bool = False) -> int:
        """Returns a sequence with tokens if there is one; full: with tokens in every layer."""
        wanted = {id for id, layers in self.model.sequences.items() if (all if full else any)(each.tokens for each in layers)}
        found = one_of(wanted, which) if which < GONE else None
        if found is None and full:
            return self.chosen(which)
        return self.sequence(which) if found is None else found

    @precondition(lambda self: self.objects)
    @rule(which=SEQUENCE, layer=ANY, positions=POSITIONS, group=st.integers(1, 2), kind=kinds(everything=False))
    def read(self, which: int, layer: int, positions: tuple[int, ...], group: int, kind: str) -> None:
        sequence, layer = self.chosen(which), within(layer, self.layers)
        tokens = [layer.tokens for layer in self.model.sequences.get(sequence, [])]
        length = len(tokens[layer]) if layer < len(tokens) else 0
        there = [within(position, length) for position in positions]
        self.ask("read", self.objects[0], sequence=sequence, layer=layer, positions=there)
        self.ask("length", self.objects[0], sequence=sequence, layer=layer)
        query = self.source.rows((1, self.shape[0] * self.subject.size("group_size", group), self.shape[1]), kind)
        self.call("attend", self.objects[0], sequence=sequence, layer=layer, query=query, scale=0.5)
