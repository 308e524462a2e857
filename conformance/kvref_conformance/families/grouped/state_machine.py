"""The state machine of the family `grouped`."""

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvref_conformance.families.grouped.model import Grouped
from kvref_conformance.families.paged.state_machine import DTYPE, scaled_too
from kvref_conformance.fuzz.base_machine import (
    ANY_INDEX,
    LAST_INDEX,
    TRUNCATION,
    clip_index,
    make_pair,
)
from kvref_conformance.fuzz.prompted_machine import (
    BRANCH,
    FRESH,
    PROMPT_LENGTH,
    SALT,
    SEQUENCE,
    PromptedStateMachine,
    prompt,
    salted,
)
from kvref_conformance.fuzz.row_generators import row_kinds
from kvref_conformance.fuzz.state_registry import ModelCall, register_error_states, state
from kvref_conformance.oracle.formats import group_of

STEP = st.sampled_from((1, 1, 1, 2, 3, 5, 5, 0, 8, 1))  # tokens of a step
ALL = 99  # stands for as many queries as there are tokens
ASKED = st.sampled_from((1, 2, 4, ALL, 3, 8, ALL, 0))  # number of queries in a call of `attend`
TIMES = st.sampled_from((1, 2, 2, 4, 6))  # steps in a row
SOMETIMES = st.sampled_from((False, False, True))
TO = st.sampled_from((None, None, None, 0, 1, 2))


class GroupedStateMachine(PromptedStateMachine):
    family = "grouped"
    max_sequences = 3

    @initialize(
        blocks=st.sampled_from((12, 9, 16, 7, 24, 5)), size=st.sampled_from((2, 1, 3, 2)), groups=st.sampled_from((2, 2, 3, 1)),
        each=st.sampled_from((1, 1, 2)), window=st.sampled_from((3, 1, 2, 4, 5, 7)), dim=st.sampled_from((1, 3)),
        dtype=DTYPE,
    )  # fmt: skip
    def new(self, blocks: int, size: int, groups: int, each: int, window: int, dim: int, dtype: str) -> None:
        dtype = scaled_too(self, dtype)
        dim = max(dim, group_of(dtype))
        self.make_object(
            num_blocks=blocks, block_size=size, num_layers=groups * each, num_groups=groups, window=window, num_kv_heads=1,
            head_dim=dim, dtype=dtype,
        )  # fmt: skip
        if self.objects:
            self.shape = self.config["num_kv_heads"], self.config["head_dim"]
            self.stride = self.config["block_size"] if self.config["block_size"] > 3 else 1  # factor for numbers of tokens
            self.create()

    @property
    def known(self) -> Grouped:
        found = self.models[self.objects[0]]
        assert isinstance(found, Grouped)
        return found

    @property
    def lengths(self) -> dict[int, int]:
        return self.known.lengths

    @property
    def committed(self) -> dict[int, list[int]]:
        return {sequence: tokens for sequence, (_, tokens) in self.known.told.items()}

    @property
    def has_unknown_hits(self) -> bool:
        return self.known.held.unsure

    def edits(self, which: int) -> dict[str, Callable[[int], Any]]:
        self.edited = self.sequence(which)
        return {
            "create": self.create_in_a_row,
            "drop": self.drop_in_a_row,
            "fork": self.fork_in_a_row,
            "truncate": self.truncate_in_a_row,
            "begin": self.begin_in_a_row,
            "commit": lambda number: self.commit_all(self.edited),
            "reset": self.reset_in_a_row,
            "step": lambda number: self.rows(self.edited, (1 + number) * self.stride, "uneven"),
        }

    def truncate_in_a_row(self, number: int) -> None:
        length = self.lengths.get(self.edited, 0)
        self.call("truncate", self.objects[0], sequence=self.edited, length=0 if number == 7 else max(0, length - number))
        self.plans[self.edited] = []

    @precondition(lambda self: self.objects)
    @rule(which=SEQUENCE, count=STEP, times=TIMES, commit=st.booleans(), kind=row_kinds())
    def step(self, which: int, count: int, times: int, commit: bool, kind: str) -> None:
        sequence = self.sequence(which)
        for _ in range(times):
            self.rows(sequence, count * self.stride, kind)
            if commit:
                self.commit_all(sequence)

    step_more = step
    step_again = step

    def rows(self, sequence: int, count: int, kind: str) -> None:
        keys, values = make_pair(self.source, (self.config["num_layers"], count, *self.shape), kind)
        self.call("step", self.objects[0], sequence=sequence, keys=keys, values=values)

    @precondition(lambda self: self.objects)
    @rule(which=SEQUENCE, wrong=st.integers(0, 5), side=st.integers(0, 2))
    def step_wrongly(self, which: int, wrong: int, side: int) -> None:
        keys, values = self.source.wrong_pair((self.config["num_layers"], 2, *self.shape), wrong, side)
        self.call("step", self.objects[0], sequence=self.sequence(which), keys=keys, values=values)

    @precondition(lambda self: self.objects)
    @rule(
        branch=BRANCH,
        count=PROMPT_LENGTH,
        salt=SALT,
        by=st.sampled_from((1, 2, 1, 20)),
        late=SOMETIMES,
        drop=st.booleans(),
        kind=row_kinds(),
    )
    def begin(self, branch: int, count: int, salt: str, by: int, late: bool, drop: bool, kind: str) -> None:
        """Serves a prompt as an engine does: appends the tokens after the hit in steps, and commits after each or the last."""
        if self.has_unknown_hits:
            return
        if not self.room() and self.lengths:
            self.call("drop", self.objects[0], sequence=self.sequence(branch % self.max_sequences))
        tokens = prompt(branch * self.stride, count * self.stride)
        begun = self.call("begin", self.objects[0], tokens=tokens, **salted(salt))
        if begun is None:
            return
        self.plans[begun] = tokens
        while self.going and begun in self.lengths and (length := self.lengths[begun]) < len(tokens):
            self.rows(begun, min(by * self.stride, len(tokens) - length), kind)
            if self.lengths.get(begun) == length:
                return  # there is no room
            if not late or self.lengths.get(begun) == len(tokens):
                self.commit_all(begun)
        if drop and self.going:
            self.call("drop", self.objects[0], sequence=begun)

    begin_more = begin

    @precondition(lambda self: self.objects)
    @rule(which=SEQUENCE, draft=st.sampled_from((0, 2, 4)), back=TRUNCATION, to=TO, count=STEP, kind=row_kinds())
    def truncate(self, which: int, draft: int, back: int, to: int | None, count: int, kind: str) -> None:
        """Truncates to `to` tokens, or by `back` tokens, and appends others.

        draft: tokens appended in one step before, because only tokens of the last step can be truncated after a window passed.
        """
        sequence = self.sequence(which)
        if draft:
            self.rows(sequence, draft * self.stride, kind)
        length = self.lengths.get(sequence, 0)
        self.call("truncate", self.objects[0], sequence=sequence, length=length - back if to is None else to)
        if sequence in self.lengths:
            self.plans[sequence] = []
            self.rows(sequence, count * self.stride, kind)

    @precondition(lambda self: self.objects)
    @rule(which=SEQUENCE, count=STEP, kind=row_kinds())
    def fork(self, which: int, count: int, kind: str) -> None:
        if self.room() or which == LAST_INDEX:
            sequence = self.sequence(which)
            child = self.call("fork", self.objects[0], sequence=sequence)
            if child is not None:
                self.rows(child, count * self.stride, kind)
                if count in (2, 3):
                    self.commit_after_fork(sequence, child, kind)

    def commit_after_fork(self, sequence: int, child: int, kind: str) -> None:
        """Replaces a committed token of the child and commits it. The parent then commits wrong tokens, and its own."""
        committed = list(self.committed[sequence])
        if committed:
            self.call("truncate", self.objects[0], sequence=child, length=len(committed) - 1)
            self.plans[child] = []
        for each in (child, sequence):
            if committed and each == sequence:
                self.call("commit", self.objects[0], sequence=sequence, tokens=[*committed[:-1], FRESH])
            if each in self.lengths:
                self.rows(each, self.stride, kind)
                self.commit_all(each)

    fork_more = fork

    @precondition(lambda self: self.objects)
    @rule(which=SEQUENCE, layer=ANY_INDEX, position=st.integers(-1, 12))
    def read(self, which: int, layer: int, position: int) -> None:
        layer, at = clip_index(layer, self.config["num_layers"]), position * (self.stride if position > 0 else 1)
        self.call_quietly("read", self.objects[0], sequence=self.sequence(which), layer=layer, positions=[at])

    @precondition(lambda self: self.objects)
    @rule(which=SEQUENCE, layer=ANY_INDEX, count=ASKED, group=st.integers(1, 2), kind=row_kinds(everything=False))
    def attend(self, which: int, layer: int, count: int, group: int, kind: str) -> None:
        count = self.lengths.get(self.sequence(which), 1) if count == ALL else count
        query = self.source.rows((count, self.shape[0] * group, self.shape[1]), kind)
        layer = clip_index(layer, self.config["num_layers"])
        self.call_quietly("attend", self.objects[0], sequence=self.sequence(which), layer=layer, query=query, scale=0.5)

    attend_more = attend


# The states of the grouped cache that random call sequences should reach, because bugs depend on them.

register_error_states(
    "grouped", "ShapeMismatch", "DtypeMismatch", "OutOfBlocks", "SequenceNotFound", "LayerOutOfRange", "PositionOutOfRange",
    "NotTruncatable", "TokenOutOfRange", "TokenMismatch", "InUse",
)  # fmt: skip


def gone(model: Grouped, sequence: int) -> bool:
    """Returns whether a group of the sequence has freed blocks."""
    return any(name is None for entry in model.held.tables.get(sequence, []) for name in entry)


def stepped(call: ModelCall) -> tuple[Grouped, int, int, int]:
    """Returns the model before a step, the sequence, its length, and the number of tokens of the step."""
    model: Grouped = call.model
    sequence = call.args["sequence"]
    return model, sequence, model.lengths[sequence], len(call.args["keys"][0])


@state("grouped", "step")
def a_window_gives_a_block_back(call: ModelCall) -> bool:
    model, sequence, length, count = stepped(call)
    return count > 0 and bool(model.held.unseen(sequence, length))


@state("grouped", "step")
def a_window_gives_several_blocks_back(call: ModelCall) -> bool:
    model, sequence, length, count = stepped(call)
    return count > 0 and len(model.held.unseen(sequence, length)) > model.groups


@state("grouped", "step")
def a_step_is_longer_than_the_window(call: ModelCall) -> bool:
    model, _, _, count = stepped(call)
    window = model.held.windows[0]
    return window is not None and count > window


@state("grouped", "step")
def what_a_step_gives_back_is_the_room_for_it(call: ModelCall) -> bool:
    model, sequence, length, count = stepped(call)
    return count > 0 and model.held.needed(sequence, length, count) > model.held.total - model.held.used()


@state("grouped", "step", raising="OutOfBlocks")
def there_is_room_in_some_groups(call: ModelCall) -> bool:
    model: Grouped = call.model
    return call.args["sequence"] in model.lengths and model.held.total > model.held.used() and model.groups > 1


@state("grouped", "step", raising="OutOfBlocks")
def a_step_is_refused_that_would_give_blocks_back(call: ModelCall) -> bool:
    model: Grouped = call.model
    sequence = call.args["sequence"]
    return sequence in model.lengths and bool(model.held.unseen(sequence, model.lengths[sequence]))


@state("grouped", "step")
def what_others_hold_is_given_back_by_one(call: ModelCall) -> bool:
    model, sequence, length, count = stepped(call)
    return count > 0 and any(model.held.listed(name) > 1 for name in model.held.unseen(sequence, length))


@state("grouped", "step")
def a_block_is_copied_before_it_is_written_to(call: ModelCall) -> bool:
    model, sequence, length, count = stepped(call)
    return count > 0 and bool(model.held.copied(sequence, length))


@state("grouped", "step")
def what_could_be_found_is_taken(call: ModelCall) -> bool:
    model, sequence, length, count = stepped(call)
    held = model.held
    return count > 0 and held.needed(sequence, length, count) > held.total - held.used() - len(held.waiting)


@state("grouped", "begin")
def a_hit_lies_behind_what_windows_need(call: ModelCall) -> bool:
    model: Grouped = call.model
    blocks, window = model.held.hit(call.args["tokens"], call.args.get("salt", "")), model.held.windows[0]
    return window is not None and blocks * model.size - window + 1 >= model.size


@state("grouped", "begin")
def a_hit_is_shorter_than_the_last_group_finds(call: ModelCall) -> bool:
    model: Grouped = call.model
    tokens, salt = call.args["tokens"], call.args.get("salt", "")
    chain = model.held.chain(tokens[: max(0, len(tokens) - 1)], salt, model.groups - 1)
    return model.held.hit(tokens, salt) < len(chain) and all(key in model.held.found for key in chain)


@state("grouped", "begin")
def a_hit_lies_in_free_blocks(call: ModelCall) -> bool:
    model: Grouped = call.model
    return model.held.hit(call.args["tokens"], call.args.get("salt", "")) > 0 and bool(model.held.waiting)


@state("grouped", "commit")
def what_windows_gave_back_is_committed(call: ModelCall) -> bool:
    model: Grouped = call.model
    sequence = call.args["sequence"]
    known = len(model.told[sequence][1]) // model.size
    fresh = model.held.tables[sequence][known : len(call.args["tokens"]) // model.size]
    return any(name is None for entry in fresh for name in entry)


@state("grouped", "truncate")
def tokens_go_where_windows_passed(call: ModelCall) -> bool:
    model: Grouped = call.model
    sequence = call.args["sequence"]
    return call.args["length"] < model.lengths[sequence] and gone(model, sequence)


@state("grouped", "drop")
def a_sequence_whose_windows_passed_is_dropped(call: ModelCall) -> bool:
    return gone(call.model, call.args["sequence"])


@state("grouped", "fork")
def a_sequence_whose_windows_passed_is_forked(call: ModelCall) -> bool:
    return gone(call.model, call.args["sequence"])


@state("grouped", "attend", raising="PositionOutOfRange")
def a_query_sees_what_was_given_back(call: ModelCall) -> bool:
    model: Grouped = call.model
    return len(call.args["query"]) <= model.lengths[call.args["sequence"]]
