"""What state machines have in common whose caches copy sequences to host memory, and restore them by handle (SPARSE, COMPR)."""

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvref_conformance.fuzz.base_machine import ANY_INDEX, EDIT_SIZES, LAST_INDEX, FamilyStateMachine, choose_one
from kvref_conformance.oracle.offloadable_sequences import OffloadableSequences

UNKNOWN = 10**6  # an id that was never returned


class OffloadingMachine(FamilyStateMachine):
    @property
    def sequences_model(self) -> OffloadableSequences:
        found = self.models[self.objects[0]]
        assert isinstance(found, OffloadableSequences)
        return found

    def one_of(self, kind: str, index: int) -> int:
        """The id of a sequence or a copy; for LAST_INDEX, or if there is none, one that exists no more, or never did."""
        model = self.sequences_model
        live = model.sequences.keys() if kind == "sequence" else model.copies.keys()
        gone = choose_one(model.ids[kind] - live, index)
        found = None if index == LAST_INDEX else choose_one(live, index)
        return found if found is not None else UNKNOWN if gone is None else gone

    def length(self, sequence: int) -> int:
        found = self.sequences_model.sequences.get(sequence)
        return len(found.tokens) if found else 0

    def write_edits(self) -> dict[str, Callable[[int], Any]]:
        """The edits of `self.edited` that append tokens."""
        raise NotImplementedError

    def edits(self, which: int) -> dict[str, Callable[[int], Any]]:
        self.edited = self.one_of("sequence", which)
        on = self.objects[0]

        def continue_with(sequence: int | None) -> None:
            self.edited = self.edited if sequence is None else sequence

        def drop(number: int) -> None:
            self.call("drop", on, sequence=self.edited)
            self.edited = self.one_of("sequence", number)

        def some_copy(number: int) -> int:
            if not self.sequences_model.copies:
                self.call("offload", on, sequence=self.edited)
            return self.one_of("handle", number)

        return {
            "create": lambda number: continue_with(self.call("create", on)),
            **self.write_edits(),
            "truncate": lambda number: self.call(
                "truncate", on, sequence=self.edited, length=max(0, self.length(self.edited) - EDIT_SIZES[number])
            ),
            "fork": lambda number: continue_with(self.call("fork", on, sequence=self.edited)),
            "drop": drop,
            "offload": lambda number: self.call("offload", on, sequence=self.edited),
            "restore": lambda number: continue_with(self.call("restore", on, handle=some_copy(number))),
            "discard": lambda number: self.call("discard", on, handle=some_copy(number)),
        }

    @precondition(lambda self: self.objects)
    @rule(index=ANY_INDEX)
    def drop(self, index: int) -> None:
        self.call("drop", self.objects[0], sequence=self.one_of("sequence", index))

    @precondition(lambda self: self.objects)
    @rule(index=ANY_INDEX, name=st.sampled_from(("restore", "discard")))
    def use_copy(self, index: int, name: str) -> None:
        self.call(name, self.objects[0], handle=self.one_of("handle", index))
