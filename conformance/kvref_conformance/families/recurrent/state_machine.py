"""The state machine of the family `recurrent`, and the states that it should reach."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvref_conformance.families.recurrent.model import Recurrent, RecurrentSequence, StateParts
from kvref_conformance.families.recurrent.recurrence import Tokens, make_tokens
from kvref_conformance.fuzz.base_machine import (
    ANY_INDEX,
    DAMAGE_KIND,
    LAST_INDEX,
    choose_one,
    clip_index,
    damage_saved_data,
)
from kvref_conformance.fuzz.prompted_machine import BRANCH, PROMPT_LENGTH, SALT, SEQUENCE, PromptedStateMachine, prompt, salted
from kvref_conformance.fuzz.state_registry import ModelCall, register_error_states, state
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats import PLAIN_FORMATS

COUNT = st.sampled_from((1, 1, 2, 3, 4, 6, 1, 0, 9))  # tokens of an append
KIND = st.sampled_from(("whole", "whole", "real", "whole", "real", "nan"))
BACK = st.sampled_from((1, 2, 1, 3, 0, 5, -1))  # tokens that truncate removes
AXES = {"layers": "num_layers", "heads": "num_heads"}  # of the parts of a state
AXIS = st.sampled_from(tuple(AXES))
BETWEEN_PARTS = ("append", "fork", "load", "truncate", "checkpoint", "drop", "append_batch", "fork", "commit")
MAX_PARTS = 6  # saved parts that the machine keeps


class RecurrentStateMachine(PromptedStateMachine):
    family = "recurrent"
    max_sequences = 4

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[NDArray] = []  # saved parts of states, the newest at the end

    @initialize(
        blocks=st.sampled_from((6, 4, 9, 3, 12)), layers=st.sampled_from((1, 2)), heads=st.sampled_from((1, 2)),
        inputs=st.sampled_from((3, 1, 2)), width=st.sampled_from((2, 3, 1)), rule=st.sampled_from((0, 1)),
        drafts=st.sampled_from((2, 3, 0, 1, 3)), interval=st.sampled_from((2, 3, 1)), dtype=st.sampled_from(PLAIN_FORMATS),
        matrix_dtype=st.sampled_from(PLAIN_FORMATS),
    )  # fmt: skip
    def new(
        self,
        blocks: int,
        layers: int,
        heads: int,
        inputs: int,
        width: int,
        rule: int,
        drafts: int,
        interval: int,
        dtype: str,
        matrix_dtype: str,
    ) -> None:
        self.make_object(
            num_blocks=blocks, num_layers=layers, num_heads=heads, channels=2, num_inputs=inputs, key_dim=width, value_dim=2,
            delta_rule=rule, max_drafts=drafts, interval=interval, dtype=dtype, matrix_dtype=matrix_dtype,
        )  # fmt: skip
        if self.objects:
            self.create()

    @property
    def known(self) -> Recurrent:
        found = self.models[self.objects[0]]
        assert isinstance(found, Recurrent)
        return found

    @property
    def lengths(self) -> dict[int, int]:
        return {sequence: found.length for sequence, found in self.known.sequences.items()}

    @property
    def committed(self) -> dict[int, list[int]]:
        return {sequence: found.tokens for sequence, found in self.known.sequences.items()}

    @property
    def has_unknown_hits(self) -> bool:
        return self.known.unsure

    def tokens(self, *shape: int, kind: str) -> Tokens:
        rng = np.random.default_rng(self.source.num_made)
        self.source.num_made += 1
        dtype = self.source.dtype
        made = make_tokens(
            rng, self.config, self.config["num_layers"], *shape, kind="real" if kind == "nan" else kind, dtype=dtype
        )
        if kind == "nan" and made["values"].size:
            part = made[("inputs", "values")[self.source.num_made % 2]]
            part.reshape(-1)[-1] = np.nan
        return made

    def edits(self, which: int) -> dict[str, Callable[[int], Any]]:
        self.edited = self.sequence(which)
        return {
            "create": self.create_in_a_row,
            "drop": self.drop_in_a_row,
            "fork": self.fork_in_a_row,
            "append": lambda number: self.append_to(self.edited, number, "whole"),
            "append_batch": lambda number: self.batch([self.edited], [number // 2], "whole"),
            "checkpoint": lambda number: self.call("checkpoint", self.objects[0], sequence=self.edited),
            "truncate": self.truncate_in_a_row,
            "begin": self.begin_in_a_row,
            "commit": lambda number: self.commit_all(self.edited),
            "reset": self.reset_in_a_row,
            "load": self.load_in_a_row,
        }

    edit_in_a_row_again = PromptedStateMachine.edit_in_a_row

    def save_before_edits(self) -> Any:
        return self.call_quietly("save", self.objects[0], sequence=self.edited)

    def make_room(self) -> bool:
        """Drops sequences until there is a free block for a new one. Returns whether one more sequence should be created."""
        for each in [each for each in self.known.sequences if each != self.edited]:
            if self.known.missing_blocks(1):
                self.call("drop", self.objects[0], sequence=each)
        return self.room() and self.going

    def truncate_in_a_row(self, number: int) -> None:
        """Truncates to a length whose state can be restored, or to any length."""
        found, length = self.known.sequences.get(self.edited, RecurrentSequence([()])), self.length(self.edited)
        restorable = {0, length, *found.checkpoints, *found.drafts}
        self.truncate_to(self.edited, max(0, length - 3) if number == 7 else choose_one(restorable, -number) or 0)

    def load_in_a_row(self, number: int) -> None:
        self.call("load", self.objects[0], sequence=self.edited, data=self.saved)
        self.plans[self.edited] = []

    def length(self, sequence: int) -> int:
        return self.known.sequences[sequence].length if sequence in self.known.sequences else 0

    @precondition(lambda self: self.objects)
    @rule(which=SEQUENCE, count=COUNT, kind=KIND, checkpoint=st.booleans())
    def append(self, which: int, count: int, kind: str, checkpoint: bool) -> None:
        sequence = self.sequence(which)
        self.append_to(sequence, count, kind)
        if checkpoint and self.going:
            self.call("checkpoint", self.objects[0], sequence=sequence)

    append_more = append

    def append_to(self, sequence: int, count: int, kind: str) -> None:
        self.call("append", self.objects[0], sequence=sequence, **self.tokens(count, kind=kind))

    @precondition(lambda self: self.objects)
    @rule(which=SEQUENCE, part=st.sampled_from(("inputs", "keys", "values", "gates")), wrong=st.integers(0, 4))
    def append_wrong_arrays(self, which: int, part: str, wrong: int) -> None:
        tokens = self.tokens(2, kind="real")
        whole = tokens[part]
        double = [np.concatenate([whole, whole], axis=axis) for axis in (0, 1, 3)]
        tokens[part] = [*double, whole[0], whole.astype(np.float64)][wrong]
        self.call("append", self.objects[0], sequence=self.sequence(which), **tokens)

    @precondition(lambda self: self.objects)
    @rule(order=st.permutations((0, 1, 2, 3)), counts=st.lists(st.integers(0, 3), min_size=4, max_size=4), kind=KIND)
    def append_batch(self, order: Sequence[int], counts: list[int], kind: str) -> None:
        """A batch of most live sequences, in any order."""
        live = sorted(self.known.sequences)
        chosen = [live[index] for index in order if index < len(live)][: max(1, order[0])]
        self.batch(chosen, counts[: len(chosen)], kind)

    batch_more = append_batch

    def batch(self, sequences: list[int], counts: list[int], kind: str) -> None:
        width = max(counts, default=0) + (self.source.num_made % 3 == 0)
        tokens = self.tokens(len(sequences), width, kind=kind)
        for row, count in enumerate(counts):
            for each in tokens.values():
                each[:, row, count:] = np.nan
        self.call("append_batch", self.objects[0], sequences=sequences, counts=counts, **tokens)

    @precondition(lambda self: self.objects)
    @rule(which=SEQUENCE, count=st.sampled_from((3, -1)))
    def append_batch_wrongly(self, which: int, count: int) -> None:
        tokens = self.tokens(1, 2, kind="whole")
        self.call("append_batch", self.objects[0], sequences=[self.sequence(which)], counts=[count], **tokens)

    @precondition(lambda self: self.objects)
    @rule(which=SEQUENCE, drafts=st.sampled_from((2, 3, 0, 4)), back=BACK, then=COUNT, fork=st.booleans(), kind=KIND)
    def truncate(self, which: int, drafts: int, back: int, then: int, fork: bool, kind: str) -> None:
        """Appends drafts in one call, truncates some tokens, perhaps forks, and appends again."""
        sequence = self.sequence(which)
        if drafts:
            self.append_to(sequence, drafts, kind)
        self.truncate_to(sequence, self.length(sequence) - back)
        if self.going and fork and self.room() and sequence in self.known.sequences:
            child = self.call("fork", self.objects[0], sequence=sequence)
            if child is not None and self.going:  # its parent could be truncated to these lengths
                self.truncate_to(child, max(0, self.length(child) - max(1, back)))
        if self.going:
            self.append_to(sequence, then, "whole")

    truncate_more = truncate

    def truncate_to(self, sequence: int, length: int) -> None:
        self.call("truncate", self.objects[0], sequence=sequence, length=length)
        self.plans[sequence] = []

    @precondition(lambda self: self.objects)
    @rule(which=SEQUENCE, number=ANY_INDEX)
    def truncate_to_a_checkpoint(self, which: int, number: int) -> None:
        sequence = self.sequence(which)
        found = self.known.sequences.get(sequence, RecurrentSequence([()])).checkpoints
        self.truncate_to(sequence, choose_one(found, number) or 0)

    @precondition(lambda self: self.objects)
    @rule(which=SEQUENCE)
    def checkpoint(self, which: int) -> None:
        self.call("checkpoint", self.objects[0], sequence=self.sequence(which))

    @precondition(lambda self: self.objects)
    @rule(which=SEQUENCE, count=COUNT, kind=KIND)
    def fork(self, which: int, count: int, kind: str) -> None:
        if self.room() or which == LAST_INDEX:
            sequence = self.sequence(which)
            child = self.call("fork", self.objects[0], sequence=sequence)
            if child is not None and self.going:
                self.append_to((child, sequence)[count % 2], count, kind)

    @precondition(lambda self: self.objects)
    @rule(which=SEQUENCE, layer=st.sampled_from((0, 1, LAST_INDEX)), count=st.integers(0, 3))
    def apply(self, which: int, layer: int, count: int) -> None:
        query = self.tokens(count, kind=("whole", "real")[count % 2])["keys"][0]
        layer = clip_index(layer, self.config["num_layers"])
        self.call_quietly("apply", self.objects[0], sequence=self.sequence(which), layer=layer, query=query)

    @precondition(lambda self: self.objects)
    @rule(branch=BRANCH, count=PROMPT_LENGTH, salt=SALT, by=st.sampled_from((1, 2, 3)), drop=st.booleans())
    def begin(self, branch: int, count: int, salt: str, by: int, drop: bool) -> None:
        """Serves a prompt as an engine does: appends the tokens after the hit, with checkpoints, and commits them."""
        if self.has_unknown_hits:
            return
        if not self.room() and self.known.sequences:
            self.call("drop", self.objects[0], sequence=self.sequence(branch % self.max_sequences))
        tokens = prompt(branch, count)
        begun = self.call("begin", self.objects[0], tokens=tokens, **salted(salt)) if self.going else None
        if begun is None:
            return
        self.plans[begun] = tokens
        while self.going and (length := self.length(begun)) < len(tokens):
            self.append_to(begun, min(by, len(tokens) - length), "whole")
            if self.length(begun) == length:
                return
            self.call("checkpoint", self.objects[0], sequence=begun)
            self.commit_all(begun)
        if drop and self.going:
            self.call("drop", self.objects[0], sequence=begun)

    begin_more = begin

    @precondition(lambda self: self.objects)
    @rule(which=SEQUENCE, into=SEQUENCE, count=COUNT, damage=DAMAGE_KIND, kind=KIND)
    def save_and_load(self, which: int, into: int, count: int, damage: int, kind: str) -> None:
        """Saves a sequence, changes it, and loads the file into it or another."""
        sequence = self.sequence(which)
        data = self.call("save", self.objects[0], sequence=sequence)
        if data is not None and self.going:
            self.append_to(sequence, count, kind)
            into = self.sequence(into)
            self.call("load", self.objects[0], sequence=into, data=damage_saved_data(data, damage))
            self.plans[into] = []
            if self.going:
                self.append_to(into, count, "whole")

    @precondition(lambda self: self.objects)
    @rule(which=SEQUENCE, into=SEQUENCE, axis=AXIS, between=st.sampled_from(BETWEEN_PARTS), number=st.integers(0, 7))
    def save_and_load_parts(self, which: int, into: int, axis: str, between: str, number: int) -> None:
        """Saves a state in two parts, and loads them in any order into a sequence, with another call between them."""
        sequence, target, size = self.sequence(which), self.sequence(into), self.config[AXES[axis]]
        spans = [[0, 1], [1, size]] if size > 1 else [[0, 1]]
        found = [self.call("save", self.objects[0], sequence=sequence, **{axis: span}) for span in spans]
        parts = [each for each in found if each is not None]
        self.parts = [*self.parts, *parts][-MAX_PARTS:]
        if number % 2:
            parts.reverse()
        if number // 2 == 1:  # the first one is loaded again, which raises ConfigError
            parts[1:1] = parts[:1]
        for part in parts[: 1 if number // 2 == 3 else None]:  # or alone
            self.load_part(target, part)
            if self.going and target in self.known.sequences:
                edits = self.edits(into)
                self.edited = target
                self.saved = self.save_before_edits() if between == "load" else None
                if between != "load" or self.saved is not None:
                    edits[between](number)

    save_and_load_more_parts = save_and_load_parts

    @precondition(lambda self: self.objects and self.parts)
    @rule(into=SEQUENCE, number=st.integers(0, MAX_PARTS - 1), damage=DAMAGE_KIND)
    def load_a_part(self, into: int, number: int, damage: int) -> None:
        """Loads a part that was saved before, which the parts of the sequence may lack, contain, or not fit."""
        self.load_part(self.sequence(into), damage_saved_data(self.parts[-1 - number % len(self.parts)], damage))

    load_another_part = load_a_part

    @precondition(lambda self: self.objects)
    @rule(which=SEQUENCE, axis=AXIS, below=st.booleans())
    def save_a_part_out_of_range(self, which: int, axis: str, below: bool) -> None:
        span = [-1, 1] if below else [0, self.config[AXES[axis]] + 1]
        self.call_quietly("save", self.objects[0], sequence=self.sequence(which), **{axis: span})

    def load_part(self, sequence: int, data: NDArray) -> None:
        if self.going:
            self.call("load", self.objects[0], sequence=sequence, data=data)
            self.plans[sequence] = []


# The states of the recurrent cache that random call sequences should reach, because bugs depend on them.

register_error_states(
    "recurrent", "ShapeMismatch", "DtypeMismatch", "NonFinite", "OutOfBlocks", "SequenceNotFound", "LayerOutOfRange",
    "PositionOutOfRange", "NotTruncatable", "TokenOutOfRange", "TokenMismatch", "InUse", "HeadOutOfRange", "ConfigError",
)  # fmt: skip


def own(call: ModelCall) -> RecurrentSequence:
    """Returns the model of the sequence of a call, before the call."""
    found: RecurrentSequence = call.model.sequences[call.args["sequence"]]
    return found


@state("recurrent", "append")
def an_append_is_shorter_than_the_inputs(call: ModelCall) -> bool:
    return 0 < call.tokens < call.model.config["num_inputs"] and own(call).length > 0


@state("recurrent", "append")
def several_tokens_are_appended_to_a_state(call: ModelCall) -> bool:
    return call.tokens > 1 and own(call).length > 0


@state("recurrent", "append")
def tokens_are_appended_after_rejected_drafts(call: ModelCall) -> bool:
    found = own(call)
    return call.tokens > 0 and found.drafts.stop == found.length > 0


@state("recurrent", "append_batch")
def a_batch_is_not_in_the_order_of_its_sequences(call: ModelCall) -> bool:
    named = list(call.args["sequences"])
    return named != sorted(named)


@state("recurrent", "append_batch")
def a_row_of_a_batch_is_padding(call: ModelCall) -> bool:
    return 0 in call.args["counts"] and any(call.args["counts"])


@state("recurrent", "truncate")
def all_drafts_of_an_append_are_rejected(call: ModelCall) -> bool:
    found = own(call)
    return call.args["length"] in found.drafts and call.args["length"] == found.drafts.start > 0


@state("recurrent", "truncate")
def some_drafts_of_an_append_are_rejected(call: ModelCall) -> bool:
    found = own(call)
    return call.args["length"] in found.drafts and call.args["length"] > found.drafts.start


@state("recurrent", "truncate")
def a_checkpoint_is_restored(call: ModelCall) -> bool:
    found = own(call)
    return call.args["length"] in found.checkpoints and call.args["length"] < found.length


@state("recurrent", "fork")
def a_sequence_with_rejected_drafts_is_forked(call: ModelCall) -> bool:
    found = own(call)
    return found.drafts.stop == found.length > 0


@state("recurrent", "fork")
def a_sequence_with_a_checkpoint_is_forked(call: ModelCall) -> bool:
    return bool(own(call).checkpoints)


@state("recurrent", "begin")
def a_checkpoint_is_found(call: ModelCall) -> bool:
    return bool(call.model._hit(call.args["tokens"], call.args.get("salt", ""))[0])


@state("recurrent", "begin")
def a_released_checkpoint_is_found(call: ModelCall) -> bool:
    _, found = call.model._hit(call.args["tokens"], call.args.get("salt", ""))
    return found is not None and not found.users


def evicts(model: Recurrent) -> bool:
    """Returns whether the next block that is allocated is that of a cached checkpoint."""
    return bool(model.evictable) and model.used() + len(model.evictable) == model.config["num_blocks"]


@state("recurrent", "create", "fork", "begin", "checkpoint")
def a_checkpoint_is_evicted(call: ModelCall) -> bool:
    return evicts(call.model)


@state("recurrent", "drop")
def a_sequence_with_several_checkpoints_is_dropped(call: ModelCall) -> bool:
    return len(own(call).checkpoints) > 1


@state("recurrent", "load")
def a_file_replaces_a_state_with_checkpoints(call: ModelCall) -> bool:
    return bool(own(call).checkpoints)


def part_of_a_state(call: ModelCall) -> StateParts | None:
    """Returns the part that a call loads, or None for other data."""
    found = call.model.saved_states.get(np.asarray(call.args["data"]).tobytes())
    return found.content if found is not None and isinstance(found.content, StateParts) else None


@state("recurrent", "load")
def the_last_part_of_a_state_is_loaded(call: ModelCall) -> bool:
    return part_of_a_state(call) is not None and own(call).parts is not None


@state("recurrent", "load")
def the_first_part_of_a_state_is_loaded(call: ModelCall) -> bool:
    return part_of_a_state(call) is not None and own(call).parts is None


@state("recurrent", "load")
def a_whole_state_is_loaded_after_a_part(call: ModelCall) -> bool:
    return part_of_a_state(call) is None and own(call).parts is not None


@state("recurrent", "append")
def tokens_are_appended_between_two_parts(call: ModelCall) -> bool:
    return own(call).parts is not None


@state("recurrent", "fork")
def a_sequence_with_loaded_parts_is_forked(call: ModelCall) -> bool:
    return own(call).parts is not None


@state("recurrent", "drop")
def a_sequence_with_loaded_parts_is_dropped(call: ModelCall) -> bool:
    return own(call).parts is not None
