"""The base class of state machines of caches that find sequences by their prompts: `begin`, `commit`, `match` and `reset`."""

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvref_conformance.fuzz.base_machine import ANY_INDEX, LAST_INDEX, FamilyStateMachine, choose_one

SEQUENCE = ANY_INDEX
BRANCH = st.sampled_from((0, 0, 0, 2, 3, 5))  # the position at which a prompt begins to differ from the common prompt; 0: nowhere
PROMPT_LENGTH = st.integers(0, 12)
SALT = st.sampled_from(("", "", "", "", "a"))
FRESH = 10**6  # tokens above this are in no prompt


def prompt(branch: int, count: int) -> list[int]:
    """Returns a prompt; many of them have a common prefix."""
    return [1 + (branch > 0 and position >= branch) * branch for position in range(count)]


def salted(salt: str) -> dict[str, str]:
    """Returns the argument `salt` of a call, or none if it is empty."""
    return {"salt": salt} if salt else {}


class PromptedStateMachine(FamilyStateMachine):
    """A machine of one cache, with the calls on sequences that grouped and recurrent caches have in common."""

    max_sequences: int  # live sequences
    stride = 1  # factor for numbers of tokens

    def __init__(self) -> None:
        super().__init__()
        self.plans: dict[int, list[int]] = {}  # per sequence, the tokens of its prompt
        self.fresh = FRESH

    @property
    def known(self) -> Any:
        """The model of the cache. Its `ids` are those of all sequences that were ever created."""
        raise NotImplementedError

    @property
    def lengths(self) -> Mapping[int, int]:
        """The lengths of the live sequences."""
        raise NotImplementedError

    @property
    def committed(self) -> Mapping[int, list[int]]:
        """The committed tokens of the live sequences, or those with which they were found."""
        raise NotImplementedError

    @property
    def has_unknown_hits(self) -> bool:
        """Whether more than one reply to `begin` and `match` is right, because blocks may be evicted in any order."""
        raise NotImplementedError

    def sequence(self, which: int) -> int:
        """Returns the id of a live sequence for any index, or for LAST_INDEX an unknown id."""
        found = None if which == LAST_INDEX else choose_one(self.lengths, which)
        return max(self.known.ids, default=0) + 1 if found is None else found

    def room(self) -> bool:
        """Returns whether one more sequence should be created."""
        return len(self.lengths) < min(self.max_sequences, self.subject.size("sequences", 99))

    def make_room(self) -> bool:
        """Prepares an edit that creates a sequence. Returns whether it should be made."""
        return self.room()

    def continue_with(self, sequence: int | None) -> None:
        """Makes the next edits on this sequence, if it was created."""
        self.edited = self.edited if sequence is None else sequence

    def create_in_a_row(self, number: int) -> None:
        if self.make_room():
            self.continue_with(self.call("create", self.objects[0]))

    def drop_in_a_row(self, number: int) -> None:
        self.call("drop", self.objects[0], sequence=self.edited)
        self.continue_with(choose_one(self.lengths, number))

    def fork_in_a_row(self, number: int) -> None:
        if self.make_room():
            child = self.call("fork", self.objects[0], sequence=self.edited)
            self.continue_with(child if number % 2 else None)

    def begin_in_a_row(self, number: int) -> None:
        if self.make_room() and not self.has_unknown_hits:
            tokens = prompt((0, 0, 3, 5)[number % 4] * self.stride, (2 + number) * self.stride)
            begun = self.call("begin", self.objects[0], tokens=tokens)
            if begun is not None:
                self.plans[begun] = tokens
                self.continue_with(begun)

    def reset_in_a_row(self, number: int) -> None:
        self.reset_all()

    def reset_all(self) -> None:
        for sequence in list(self.lengths):
            self.call("drop", self.objects[0], sequence=sequence)
        self.call("reset", self.objects[0])

    def tokens_to_commit(self, sequence: int) -> list[int]:
        """Returns the tokens of a sequence: the committed ones, then those of its prompt, then tokens of no prompt."""
        committed, length = self.committed[sequence], self.lengths[sequence]
        tokens = [*committed, *self.plans.get(sequence, [])[len(committed) :]][:length]
        while len(tokens) < length:
            self.fresh += 1
            tokens.append(self.fresh)
        return tokens

    def commit_all(self, sequence: int) -> None:
        if sequence in self.lengths:
            self.call("commit", self.objects[0], sequence=sequence, tokens=self.tokens_to_commit(sequence))

    @precondition(lambda self: self.objects)
    @rule()
    def create(self) -> None:
        if self.room():
            self.call("create", self.objects[0])

    @precondition(lambda self: self.objects)
    @rule(which=SEQUENCE)
    def drop(self, which: int) -> None:
        self.call("drop", self.objects[0], sequence=self.sequence(which))

    @precondition(lambda self: self.objects)
    @rule(which=SEQUENCE, wrong=st.sampled_from((0, 0, 1, 2, 3, 3)))
    def commit(self, which: int, wrong: int) -> None:
        """Commits all tokens of a sequence. wrong: 1 too many, 2 a negative token, 3 another token where one is committed."""
        sequence = self.sequence(which)
        if wrong == 3:
            if not any(self.committed.values()):
                self.commit_all(sequence)
            committed = choose_one((each for each, tokens in self.committed.items() if tokens), which)
            sequence = sequence if committed is None else committed
        if sequence not in self.lengths:
            self.call("commit", self.objects[0], sequence=sequence, tokens=[1])
        elif not wrong:
            self.commit_all(sequence)
        else:
            there = self.tokens_to_commit(sequence)
            tokens = {1: [*there, 1], 2: [*there[:-1], -1], 3: [FRESH, *there[1:]]}
            self.call("commit", self.objects[0], sequence=sequence, tokens=tokens[wrong])

    @precondition(lambda self: self.objects)
    @rule(branch=BRANCH, count=PROMPT_LENGTH, salt=SALT, wrong=st.sampled_from((False, False, False, True)))
    def match(self, branch: int, count: int, salt: str, wrong: bool) -> None:
        """Matches a prompt. wrong: it ends with a negative token."""
        tokens = [*prompt(branch * self.stride, count * self.stride), *([-1] if wrong else [])]
        if wrong or not self.has_unknown_hits:
            self.call("match", self.objects[0], tokens=tokens, **salted(salt))

    @precondition(lambda self: self.objects)
    @rule(all=st.booleans())
    def reset(self, all: bool) -> None:
        """Resets the cache, which raises InUse unless all sequences are dropped before."""
        self.reset_all() if all else self.call("reset", self.objects[0])
