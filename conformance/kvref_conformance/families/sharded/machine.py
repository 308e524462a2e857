"""State machine of the family `sharded`: random call sequences."""

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvref_conformance.families.sharded.model import Sharded
from kvref_conformance.searching.machine import ANY, BACK, COUNT, LAST, Machine, pair
from kvref_conformance.searching.rows import kinds

# Heads, rows and columns: divided heads and copied heads, with and without several columns.
GRID = st.sampled_from(((2, 2, 2), (1, 1, 3), (2, 4, 1), (2, 1, 2), (1, 2, 2), (3, 3, 1), (2, 1, 1), (4, 2, 2), (6, 2, 1)))
RANK = st.sampled_from((*range(8), LAST))
QUERIES = st.sampled_from((1, 3, 99, 2, 3, 0))  # 99: one query per token


class ShardedMachine(Machine):
    family = "sharded"

    @initialize(
        grid=GRID, size=st.sampled_from((2, 1, 3)), blocks=st.sampled_from((3, 2, 5, 1)), dim=st.sampled_from((1, 3)),
        dtype=st.sampled_from(("float32", "float16", "bfloat16")),
    )  # fmt: skip
    def new(self, grid: tuple[int, int, int], size: int, blocks: int, dim: int, dtype: str) -> None:
        heads, rows, columns = grid
        self.make(
            num_kv_heads=heads, head_dim=dim, head_ranks=rows, token_ranks=columns, block_size=size, num_blocks=blocks,
            dtype=dtype,
        )  # fmt: skip

    @property
    def model(self) -> Sharded:
        model = self.witness.models[self.objects[0]]
        assert isinstance(model, Sharded)
        return model

    def rank(self, which: int) -> int:
        """An existing rank for any index, or for LAST one that does not exist."""
        return len(self.model.ranks) if which == LAST else which % len(self.model.ranks)

    @precondition(lambda self: self.objects)
    @rule(count=COUNT, kind=kinds())
    def append(self, count: int, kind: str) -> None:
        kind = "counting" if self.model.failing and kind in ("nan", "infinity") else kind  # either of two errors would be valid
        keys, values = pair(self.source, (count, *self.model.row), kind)
        self.call("append", self.objects[0], keys=keys, values=values)

    append_more = append

    @precondition(lambda self: self.objects)
    @rule(wrong=st.integers(0, 5), side=st.integers(0, 2))
    def append_wrongly(self, wrong: int, side: int) -> None:
        keys, values = self.source.wrong_pair((2, *self.model.row), wrong, side)
        self.call("append", self.objects[0], keys=keys, values=values)

    @precondition(lambda self: self.objects)
    @rule(count=QUERIES, more=st.sampled_from((0, 0, 0, 1)), group=st.integers(1, 3), kind=kinds(everything=False))
    def attend(self, count: int, more: int, group: int, kind: str) -> None:
        """more: 1 for more queries than tokens."""
        heads, dim = self.model.row
        length, group = len(self.model.tokens), self.subject.size("group_size", group)
        query = self.source.rows((min(count, length) + more * (length + 1), heads * group, dim), kind)
        self.ask("attend", self.objects[0], query=query, scale=0.5)

    attend_more = attend

    @precondition(lambda self: self.objects)
    @rule(back=BACK, count=COUNT, kind=kinds())
    def truncate(self, back: int, count: int, kind: str) -> None:
        self.call("truncate", self.objects[0], length=len(self.model.tokens) - back)
        self.append(count, kind)

    @precondition(lambda self: self.objects)
    @rule(count=COUNT, kind=kinds())
    def clear(self, count: int, kind: str) -> None:
        self.call("clear", self.objects[0])
        self.append(count, kind)

    @precondition(lambda self: self.objects)
    @rule(which=RANK, name=st.sampled_from(("heads", "read_rank", "positions", "block_table", "num_bytes")))
    def look_at(self, which: int, name: str) -> None:
        self.ask(name, self.objects[0], rank=self.rank(which))

    @precondition(lambda self: self.objects and len(self.model.tokens) > 1)
    @rule(which=RANK, in_append=st.sampled_from((True, True, False)), count=COUNT, again=ANY)
    def lose(self, which: int, in_append: bool, count: int, again: int) -> None:
        """Lose a rank at once or during the next append, then call an operation on it."""
        rank = self.rank(which)
        self.call("lose_in_append" if in_append else "lose", self.objects[0], rank=rank)
        if in_append:
            self.append(count, "counting")
        name = ("read_rank", "positions", "lose")[again % 3]
        self.call(name, self.objects[0], rank=rank)
