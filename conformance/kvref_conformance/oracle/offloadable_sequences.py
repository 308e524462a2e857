"""What models have in common whose caches copy sequences to host memory, and restore them by handle (SPARSE, COMPR)."""

from collections.abc import Callable
from typing import Any, ClassVar

from kvref_conformance.oracle.expectations import AnyOf, Errors, ExactValue, Expectation, id_errors, is_integer
from kvref_conformance.oracle.reference_model import ReferenceModel


class OffloadableSequences(ReferenceModel):
    """Sequences and copies of their tokens.

    sequence_clause, copy_clause: the clauses about reused and unknown ids of sequences, and about handles. sequences: by id, an
    object with `tokens`. copies: the tokens of each offloaded sequence, by handle. ids: all ids that were ever returned, by kind.
    """

    sequence_clause: ClassVar[str]
    copy_clause: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.sequences: dict[int, Any] = {}
        self.copies: dict[int, list[Any]] = {}
        self.ids: dict[str, set[int]] = {"sequence": set(), "handle": set()}

    def unknown(self, sequence: Any) -> Errors:
        return id_errors(sequence, self.sequences, clause=self.sequence_clause)

    def unknown_handle(self, handle: Any) -> Errors:
        return id_errors(handle, self.copies, "KeyNotFound", self.copy_clause)

    def new_id(self, clause: str, name: str, change: Callable[[int], None], kind: str = "sequence") -> AnyOf:
        """The reply of a call that returns an id never used before, and changes the model by it. kind: "sequence" or "handle".

        clause: the clause that an error breaks. An id that was used before breaks `sequence_clause` or `copy_clause`.
        """
        used, broken = set(self.ids[kind]), self.sequence_clause if kind == "sequence" else self.copy_clause

        def then(id: int) -> None:
            self.ids[kind].add(id)
            change(id)

        def accepts(id: Any) -> bool:
            return is_integer(id) and id >= 0 and id not in used

        text = f"an id never used before, not among {sorted(used)}"
        return AnyOf(clause, self.on_success(name, then), range_text=text, accepts=accepts, value_clause=broken)

    def drop(self, sequence: Any) -> Expectation:
        if wrong := self.unknown(sequence):
            return self.expect_error(wrong)
        return Expectation(self.sequence_clause, self.on_success("drop", lambda ok: self.sequences.__delitem__(sequence)))

    def length(self, sequence: Any) -> Expectation:
        if wrong := self.unknown(sequence):
            return self.expect_error(wrong)
        return ExactValue(self.clause_of("length"), value=len(self.sequences[sequence].tokens))

    def offload(self, sequence: Any) -> Expectation:
        if wrong := self.unknown(sequence):
            return self.expect_error(wrong)
        tokens = list(self.sequences[sequence].tokens)
        return self.new_id(self.copy_clause, "offload", lambda id: self.copies.update({id: tokens}), "handle")

    def discard(self, handle: Any) -> Expectation:
        if wrong := self.unknown_handle(handle):
            return self.expect_error(wrong)
        return Expectation(self.copy_clause, self.on_success("discard", lambda ok: self.copies.__delitem__(handle)))
