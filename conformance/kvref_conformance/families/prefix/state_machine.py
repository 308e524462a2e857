"""The state machine of the family `prefix`, which includes the rules of the paged cache."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvref_conformance.families.paged.state_machine import DTYPE, SEQUENCE, PagedStateMachine
from kvref_conformance.families.paged.table_model import stored
from kvref_conformance.families.prefix.model import Prefix
from kvref_conformance.families.prefix.prefix_index_model import Key, Label, PrefixIndexState
from kvref_conformance.fuzz.base_machine import choose_one, make_pair
from kvref_conformance.fuzz.row_generators import row_kinds
from kvref_conformance.fuzz.state_registry import ModelCall, register_error_states, state
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.reference_model import TooManyStates
from kvref_conformance.testlib.tagged_content import content_pair

LONG = 10  # tokens of a prompt
BRANCH = st.sampled_from((0, 0, 0, 1, 3, 5))  # position at which a prompt differs from the most common one; 0: nowhere
SALT = st.sampled_from(("", "", "", "", "a"))
ADAPTER = st.sampled_from(("", "", "", "", "a"))
MEDIA = st.sampled_from(((), (), (), (), (), ((1, 4, "a"),), ((1, 4, "b"),), ((0, 2, "c"), (3, 5, "c"))))
PLACEHOLDER = 9  # the token of all media, which is in no text
FRESH = 10**6  # tokens from here on are in no prompt


def prompt(branch: int, count: int) -> list[int]:
    """Returns a prompt; many prompts have the same beginning."""
    return [1 + (branch > 0 and position >= branch) * branch for position in range(count)]


def label(count: int, stride: int, salt: str, adapter: str, media: Iterable[tuple[int, int, str]]) -> dict[str, Any]:
    """Returns the arguments of `begin` and `match` that are not empty, with the media that are within `count` tokens."""
    placed = [[start * stride, stop * stride, content] for start, stop, content in media if stop * stride <= count]
    return {name: value for name, value in (("salt", salt), ("adapter", adapter), ("media", placed)) if value}


def with_placeholders(tokens: list[int], media: Sequence[tuple[int, int, str]] = (), **label: str) -> list[int]:
    """Returns the tokens with a placeholder at each position of the media."""
    covered = {position for start, stop, _ in media for position in range(start, stop)}
    return [PLACEHOLDER if position in covered else token for position, token in enumerate(tokens)]


def key_of(tokens: list[int], salt: str = "", adapter: str = "", media: Iterable[Sequence[Any]] = ()) -> Key:
    """Returns a prompt without its last token."""
    return Label(salt, adapter, tuple((start, stop, content) for start, stop, content in media)), tuple(tokens[:-1])


class PrefixStateMachine(PagedStateMachine):
    """The keys and values that it writes for a token of a prompt depend on the token, its position and the layer only.

    Thus equal prompts have equal keys and values, as in a model. Rows that other rules wrote are committed as new tokens.
    """

    family = "prefix"
    move = None  # type: ignore[assignment]  # the paged state machine tests save and load

    @initialize(
        blocks=st.sampled_from((8, 6, 10, 5, 12, 7, 24)), size=st.sampled_from((2, 1, 3, 2)), layers=st.sampled_from((1, 2, 1)),
        heads=st.integers(1, 2), dim=st.sampled_from((1, 3, 2, 4)), dtype=DTYPE, sequences=st.sampled_from((0, 0, 1)),
    )  # fmt: skip
    def new(self, **sizes: Any) -> None:
        self.plans: dict[int, list[int]] = {}  # sequence -> the tokens that it began with
        self.fresh = FRESH
        super().new(**sizes)

    @property
    def prefix_model(self) -> Prefix:
        found = self.model
        assert isinstance(found, Prefix)
        return found

    def compute(self, tokens: list[int], layer: int, positions: range) -> tuple[NDArray, NDArray]:
        return content_pair(tokens[positions.start : positions.stop], layer, positions, *self.shape)

    def tokens_to_commit(self, sequence: int, count: int) -> list[int]:
        """Returns the tokens to commit for a sequence: its prompt where the written rows belong to it, otherwise new tokens."""
        model, tokens = self.prefix_model, list(self.prefix_model.committed[sequence][1])
        plan = self.plans.get(sequence, [])
        for position in range(len(tokens), count):
            if not self.follows_prompt(sequence, plan, position):
                self.fresh += 1
            tokens.append(plan[position] if self.follows_prompt(sequence, plan, position) else self.fresh)
        return tokens[: max(count, 0)] if model else []

    def follows_prompt(self, sequence: int, plan: list[int], position: int) -> bool:
        if position >= len(plan):
            return False
        for layer, here in enumerate(self.prefix_model.sequences[sequence]):
            if position < len(here.tokens):
                ((wanted,), _) = stored(*self.compute(plan, layer, range(position, position + 1)), self.prefix_model.dtype)
                if any((want.values != part.values).any() for want, part in zip(wanted, here.tokens[position], strict=True)):
                    return False
        return True

    def edits(self, which: int) -> dict[str, Callable[[int], Any]]:
        edits = super().edits(which)
        del edits["load"]
        return edits | {
            "begin": self.begin_in_a_row,
            "commit": lambda number: self.commit_in_a_row(LONG * self.stride),
            "reset": self.reset_in_a_row,
        }

    def begin_in_a_row(self, number: int) -> None:
        if len(self.prefix_model.sequences) < self.subject.size("sequences", 99):
            tokens = prompt((0, 0, 3, 5)[number % 4], (2 + number) * self.stride)
            sequence = self.call("begin", self.objects[0], tokens=tokens)
            if sequence is not None:
                self.plans[sequence] = tokens
                self.continue_with(sequence)

    def commit_in_a_row(self, count: int) -> None:
        if self.edited in self.prefix_model.sequences:
            self.commit_all(self.edited, count)

    def reset_in_a_row(self, number: int) -> None:
        for sequence in list(self.prefix_model.sequences):
            self.call("drop", self.objects[0], sequence=sequence)
        self.call("reset", self.objects[0])

    @precondition(lambda self: self.objects)
    @rule(
        branch=BRANCH, count=st.integers(0, LONG), salt=SALT, adapter=ADAPTER, media=MEDIA, drop=st.booleans(),
        fill=st.sampled_from((True, True, True, False)),
    )  # fmt: skip
    def begin(self, branch: int, count: int, salt: str, adapter: str, media: Any, drop: bool, fill: bool) -> None:
        """Serves a prompt as an engine does: begins it, writes the tokens after the hit, and commits all."""
        if len(self.prefix_model.sequences) > 2:
            self.call("drop", self.objects[0], sequence=self.sequence(branch))
        tokens, begun = prompt(branch, count * self.stride), list[int]()
        labelled = label(len(tokens), self.stride, salt, adapter, media)
        tokens = with_placeholders(tokens, **labelled)
        for _ in range(1 if fill or drop else 2):  # two requests with the same prompt begin before either is computed
            if len(self.prefix_model.sequences) < self.subject.size("sequences", 99):
                sequence = self.call("begin", self.objects[0], tokens=tokens, **labelled)
                if sequence is not None:
                    self.plans[sequence] = tokens
                    begun.append(sequence)
        for sequence in begun if fill or not drop else ():
            self.serve(sequence, len(tokens))
        if drop and self.going and begun:
            self.call("drop", self.objects[0], sequence=begun[0])
        if begun and self.going and self.prefix_model.token_hits:
            self.begin_inside_a_block(tokens, branch, fill=drop, **labelled)

    begin_more = begin

    def begin_inside_a_block(self, tokens: list[int], back: int, fill: bool, **labelled: Any) -> None:
        """Begins a prompt that differs from another one inside its last full block. fill: whether it needs all free blocks."""
        model = self.prefix_model
        size, state = model.size, model.states[0]
        end = len(tokens) // size * size
        if size > 1 and end and len(model.sequences) < self.subject.size("sequences", 99):
            self.fresh += 1
            at = end - 1 - back % (size - 1)
            other = with_placeholders([*tokens[:at], self.fresh, *tokens[at + 1 :]], **labelled)
            if fill:
                with suppress(TooManyStates):
                    hit = max(state.possible_hits(key_of(other, **labelled)), key=state.length_of)
                    found = list(chain.from_iterable(hit.path))
                    free = model.total - state.used() - sum(name in state.evictable for name in found)
                    other += [self.fresh] * ((len(found) + free) // self.layers * size - len(other))
            sequence = self.call("begin", self.objects[0], tokens=other, **labelled)
            if sequence is not None:
                self.plans[sequence] = other
                self.serve(sequence, len(other))

    def serve(self, sequence: int, count: int) -> None:
        tokens = self.plans.get(sequence, [])[:count]
        for layer in range(self.layers):
            length = len(self.prefix_model.sequences[sequence][layer].tokens)
            if length < len(tokens):
                keys, values = self.compute(tokens, layer, range(length, len(tokens)))
                self.call_quietly(
                    "write", self.objects[0], sequence=sequence, layer=layer, start=length, keys=keys, values=values
                )
        self.commit_all(sequence, count)

    def commit_all(self, sequence: int, count: int) -> None:
        shortest = min(len(layer.tokens) for layer in self.prefix_model.sequences[sequence])
        self.call("commit", self.objects[0], sequence=sequence, tokens=self.tokens_to_commit(sequence, min(count, shortest)))

    @precondition(lambda self: self.objects)
    @rule(which=SEQUENCE, count=st.integers(0, LONG), wrong=st.sampled_from((0, 0, 0, 0, 1, 2, 3)))
    def commit(self, which: int, count: int, wrong: int) -> None:
        committed = choose_one((sequence for sequence, (_, tokens) in self.prefix_model.committed.items() if tokens), which)
        sequence, count = self.sequence(which), count * self.stride
        if wrong == 3:
            if committed is None:
                return  # no sequence has committed tokens
            sequence = committed
        if sequence not in self.prefix_model.sequences:
            self.call("commit", self.objects[0], sequence=sequence, tokens=[1])
        elif not wrong:
            self.commit_all(sequence, count)
        elif wrong == 1 and self.subject.limits.switch(self.family, "tables_alone"):
            return  # it does not know the number of tokens
        else:
            there = self.tokens_to_commit(sequence, min(len(layer.tokens) for layer in self.prefix_model.sequences[sequence]))
            middle = len(self.prefix_model.committed[sequence][1]) // 2
            tokens = {1: [*there, 1], 2: [*there[:count], -1], 3: [*there[:middle], FRESH, *there[middle + 1 :]]}
            self.call("commit", self.objects[0], sequence=sequence, tokens=tokens[wrong])

    @precondition(lambda self: self.objects)
    @rule(which=st.integers(0, 2), back=st.sampled_from((0, 1, 2, 3)), kind=row_kinds())
    def commit_after_release(self, which: int, back: int, kind: str) -> None:
        """Appends tokens, releases the blocks before a window, and then commits all tokens."""
        sequence = self.chosen(which, full=True)
        keys, values = make_pair(self.source, (self.layers, 1, *self.shape), kind)
        for _ in range(2 * self.stride):
            self.call("append_step", self.objects[0], sequences=[sequence], keys=keys, values=values)
        position = max(0, self.shortest(sequence) - back * self.stride)
        self.call("release_before", self.objects[0], sequence=sequence, position=position)
        if sequence in self.prefix_model.sequences:
            self.commit_all(sequence, self.shortest(sequence))

    @precondition(lambda self: self.objects)
    @rule(
        which=st.integers(0, 2),
        back=st.sampled_from((1, 2, 4)),
        how=st.sampled_from(("truncate", "remove", "fork")),
        kind=row_kinds(),
    )
    def say_otherwise(self, which: int, back: int, how: str, kind: str) -> None:
        """Commits other tokens after committed ones were truncated or removed, or for sharers, where this raises."""
        committed = {sequence for sequence, (_, tokens) in self.prefix_model.committed.items() if tokens}
        if (sequence := choose_one(committed, which)) is None:
            return
        length = len(self.prefix_model.committed[sequence][1])
        start = max(0, length - back)
        if how == "remove" and start < self.prefix_model.first_position(sequence):
            return  # at a released position it may raise or not
        if how == "fork":
            if len(self.prefix_model.sequences) < self.subject.size("sequences", 99):
                child = self.call("fork", self.objects[0], sequence=sequence)
                if child is not None:
                    self.commit_after_fork(sequence, child, start, kind)
            return
        args = {"length": start} if how == "truncate" else {"start": start, "stop": length}
        self.call(how, self.objects[0], sequence=sequence, **args)
        shape = (self.layers, 1, *self.shape)
        keys, values = make_pair(self.source, shape, kind)
        self.call("append_step", self.objects[0], sequences=[sequence], keys=keys, values=values)
        self.commit_all(sequence, length)

    def commit_after_fork(self, sequence: int, child: int, start: int, kind: str) -> None:
        """Both sharers commit wrong tokens. In between, the child replaces its tokens; then each commits its own."""
        length, wrong = self.shortest(sequence), [*self.prefix_model.committed[sequence][1][:start], FRESH]
        for each in (child, sequence):
            self.call("commit", self.objects[0], sequence=each, tokens=wrong)
            if each == child:
                self.call("truncate", self.objects[0], sequence=child, length=start)
            if each in self.prefix_model.sequences:
                keys, values = make_pair(self.source, (self.layers, 1, *self.shape), kind)
                self.call("append_step", self.objects[0], sequences=[each], keys=keys, values=values)
                self.commit_all(each, length + 1)

    @precondition(lambda self: self.objects)
    @rule(
        branch=BRANCH, count=st.integers(0, LONG), salt=SALT, adapter=ADAPTER, media=MEDIA, wrong=st.sampled_from((0, 0, 0, 1, 2))
    )
    def match(self, branch: int, count: int, salt: str, adapter: str, media: Any, wrong: int) -> None:
        tokens = [*prompt(branch, count * self.stride), *([-1] if wrong == 1 else [])]
        labelled = label(len(tokens), self.stride, salt, adapter, media)
        if wrong == 2:
            labelled["media"] = [[0, len(tokens) + 1, "a"]]
        self.call("match", self.objects[0], tokens=with_placeholders(tokens, **labelled), **labelled)

    @precondition(lambda self: self.objects)
    @rule(all=st.booleans())
    def reset(self, all: bool) -> None:
        for sequence in list(self.prefix_model.sequences) if all else []:
            self.call("drop", self.objects[0], sequence=sequence)
        self.call("reset", self.objects[0])


# The states of the prefix cache that random call sequences should reach, because bugs depend on them.

register_error_states(
    "prefix", "TokenOutOfRange", "TokenMismatch", "InUse", "OutOfBlocks", "SequenceNotFound", "PositionOutOfRange"
)


def media_of(call: ModelCall) -> tuple[tuple[int, int, str], ...]:
    return tuple(map(tuple, call.args.get("media", ())))


def asked(call: ModelCall) -> tuple[Prefix, int]:
    """Returns the model before begin, and the number of blocks of the hit."""
    model: Prefix = call.model
    prompt = key_of(**call.args)
    return model, max(len(found.path) for possible in model.states for found in possible.possible_hits(prompt))


@state("prefix", "begin")
def a_prompt_is_found_in_part(call: ModelCall) -> bool:
    model, hit = asked(call)
    return 0 < hit < (len(call.args["tokens"]) - 1) // model.size


@state("prefix", "begin")
def what_is_found_lies_in_free_blocks(call: ModelCall) -> bool:
    model, hit = asked(call)
    return hit > 0 and any(possible.evictable for possible in model.states)


@state("prefix", "begin", "write", "ensure_capacity")
def a_block_that_could_be_found_is_taken(call: ModelCall) -> bool:
    model: Prefix = call.model
    return bool(model.free) and all(len(possible.evictable) == model.total - possible.used() for possible in model.states)


@state("prefix", "begin", raising="OutOfBlocks")
def a_prompt_that_is_found_does_not_fit(call: ModelCall) -> bool:
    return asked(call)[1] > 0


@state("prefix", "write")
def a_block_that_can_be_found_is_written_over(call: ModelCall) -> bool:
    model: Prefix = call.model
    sequence, start = call.args["sequence"], call.args["start"]
    return call.tokens > 0 and start < len(model.committed[sequence][1]) // model.size * model.size


@state("prefix", "drop")
def a_sequence_whose_blocks_can_be_found_is_dropped(call: ModelCall) -> bool:
    model: Prefix = call.model
    return len(model.committed[call.args["sequence"]][1]) >= model.size


@state("prefix", "commit")
def what_is_committed_is_there_already(call: ModelCall) -> bool:
    model: Prefix = call.model
    salt, committed = model.committed[call.args["sequence"]]
    more = model.chain(call.args["tokens"], salt)[len(committed) // model.size :]
    return any(key in possible.index for possible in model.states for key in more)


@state("prefix", "begin")
def a_prompt_with_media_is_found(call: ModelCall) -> bool:
    return bool(media_of(call)) and asked(call)[1] > 0


@state("prefix", "begin")
def a_prompt_with_an_adapter_is_found(call: ModelCall) -> bool:
    return "adapter" in call.args and asked(call)[1] > 0


@state("prefix", "truncate", "write", "remove")
def media_are_cut(call: ModelCall) -> bool:
    model: Prefix = call.model
    start = call.args["length"] if call.op == "prefix.truncate" else call.args["start"]
    media = model.committed[call.args["sequence"]][0].media
    return bool(media) and media[-1][1] > start and start < len(model.committed[call.args["sequence"]][1])


def sources_of(call: ModelCall) -> list[tuple[PrefixIndexState, set[int]]]:
    """Returns the blocks that begin can copy, in each possible state before it."""
    hits = [(possible, found) for possible in call.model.states for found in possible.possible_hits(key_of(**call.args))]
    return [(possible, {name for names in found.sources for name in names}) for possible, found in hits if found.rest]


# Of caches that declare token hits.


@state("prefix", "begin")
def a_hit_ends_inside_a_block(call: ModelCall) -> bool:
    return bool(sources_of(call))


@state("prefix", "begin")
def a_copied_block_is_in_use(call: ModelCall) -> bool:
    return any(name not in possible.evictable for possible, names in sources_of(call) for name in names)


@state("prefix", "begin")
def a_copied_block_is_evicted(call: ModelCall) -> bool:
    """Every free block is needed."""
    model: Prefix = call.model
    entries = -(-len(call.args["tokens"]) // model.size)
    hit = asked(call)[1]
    return any(
        names & possible.evictable.keys() and model.total - possible.used() == model.layers * (entries - hit)
        for possible, names in sources_of(call)
    )


@state("prefix", "begin", raising="OutOfBlocks")
def a_hit_inside_a_block_does_not_fit(call: ModelCall) -> bool:
    return bool(sources_of(call))


@state("prefix", "reset")
def something_is_forgotten(call: ModelCall) -> bool:
    return any(possible.index for possible in call.model.states)
