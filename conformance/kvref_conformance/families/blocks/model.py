"""The reference model of the block pool: the allocated blocks and the number of references of each."""

from collections.abc import Sequence
from typing import Any, ClassVar

from kvref_conformance.oracle.expectations import (  # fmt: skip
    AnyOf,
    ExactValue,
    Expectation,
    ExpectedError,
    expect_error,
    range_errors,
)
from kvref_conformance.oracle.reference_model import ReadCall, ReferenceModel


class Blocks(ReferenceModel):
    family = "blocks"
    clause_by_observation: ClassVar = {
        ("new", "num_free"): "BLOCK-01", ("allocate", "num_free"): "BLOCK-02", ("free", "num_free"): "BLOCK-04",
        ("allocate_many", "num_free"): "BLOCK-07", ("share", "num_free"): "SHARE-01", "references": "SHARE-01",
        **{("shared nothing", seen): "SHARE-02" for seen in ("num_free", "num_used", "references")},
        "num_blocks": "BLOCK-01", "num_used": "LAW-03", "utilization": "BLOCK-06",
    }  # fmt: skip
    clause_after_error = "BLOCK-05"

    def __init__(self, *, num_blocks: int) -> None:
        super().__init__()
        self.total = num_blocks
        self.references_of: dict[int, int] = {}  # block -> number of references

    def observations(self) -> list[ReadCall]:
        counts: list[ReadCall] = [(name, {}) for name in ("num_free", "num_used", "num_blocks", "utilization")]
        return counts + [("references", {"block": block}) for block in range(self.total)]

    def num_blocks(self) -> Expectation:
        return ExactValue(self.clause_of("num_blocks"), value=self.total)

    def num_free(self) -> Expectation:
        return ExactValue(self.clause_of("num_free"), value=self.total - len(self.references_of))

    def num_used(self) -> Expectation:
        return ExactValue(self.clause_of("num_used"), value=len(self.references_of))

    def utilization(self) -> Expectation:
        return ExactValue(self.clause_of("utilization"), value=len(self.references_of) / self.total if self.total else 0.0)

    def allocate(self) -> Expectation:
        if len(self.references_of) == self.total:
            return ExpectedError("BLOCK-03", kinds=("OutOfBlocks",))
        says = f"a block in [0, {self.total}) not among {sorted(self.references_of)}"
        good = set(range(self.total)) - self.references_of.keys()
        return AnyOf(
            "BLOCK-02", self.on_success("allocate", self._allocate), range_text=says, accepts=lambda block: block in good
        )

    def allocate_many(self, count: Any) -> Expectation:
        if wrong := range_errors(count, None, "PositionOutOfRange"):
            return expect_error(wrong, lambda: self.note_unchanged("allocate_many"))
        if count > self.total - len(self.references_of):
            return expect_error([("OutOfBlocks", "BLOCK-07")], lambda: self.note_unchanged("allocate_many"))
        good = set(range(self.total)) - self.references_of.keys()
        then = self.on_success("allocate_many", self._allocate_all)
        says = f"{count} different blocks of [0, {self.total}), none of them among {sorted(self.references_of)}"
        return AnyOf(
            "BLOCK-02", then, range_text=says, accepts=lambda blocks: len(set(blocks)) == count and set(blocks) <= good,
            length=(count, "BLOCK-07"),
        )  # fmt: skip

    def share(self, block: Any) -> Expectation:
        if block not in self.references_of:
            return self._refuse_sharing()
        return Expectation(
            "SHARE-01", self.on_success("share", lambda ok: self.references_of.update({block: self.references_of[block] + 1}))
        )

    def free(self, block: Any) -> Expectation:
        if block not in self.references_of:
            return self.expect_error([("BlockNotAllocated", "BLOCK-05")])
        return Expectation(
            "BLOCK-04", self.on_success("free" if self.references_of[block] == 1 else "share", lambda ok: self._free(block))
        )

    def references(self, block: Any) -> Expectation:
        if wrong := range_errors(block, self.total, "BlockNotAllocated", "SHARE-01"):
            return self.expect_error(wrong)
        return ExactValue(self.clause_of("references"), value=self.references_of.get(block, 0))

    def _refuse_sharing(self) -> ExpectedError:
        return expect_error([("BlockNotAllocated", "SHARE-02")], lambda: self.note_unchanged("shared nothing"))

    def _allocate(self, block: int) -> None:
        self.references_of[block] = 1

    def _allocate_all(self, blocks: Sequence[int]) -> None:
        self.references_of.update(dict.fromkeys(map(int, blocks), 1))

    def _free(self, block: int) -> None:
        self.references_of[block] -= 1
        if not self.references_of[block]:
            del self.references_of[block]
