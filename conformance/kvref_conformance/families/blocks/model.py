"""The reference model of the block pool: the allocated blocks and the number of references of each."""

from collections.abc import Sequence
from typing import Any, ClassVar

from kvref_conformance.oracle.expectations import AnyOf, ExactValue, Expectation, ExpectedError, not_in_range, refuse  # fmt: skip
from kvref_conformance.oracle.reference_model import Look, ReferenceModel


class Blocks(ReferenceModel):
    family = "blocks"
    blamed: ClassVar = {
        ("new", "num_free"): "BLOCK-01", ("allocate", "num_free"): "BLOCK-02", ("free", "num_free"): "BLOCK-04",
        ("allocate_many", "num_free"): "BLOCK-07", ("share", "num_free"): "SHARE-01", "references": "SHARE-01",
        **{("shared nothing", seen): "SHARE-02" for seen in ("num_free", "num_used", "references")},
        "num_blocks": "BLOCK-01", "num_used": "LAW-03", "utilization": "BLOCK-06",
    }  # fmt: skip
    blamed_after_refusal = "BLOCK-05"

    def __init__(self, *, num_blocks: int) -> None:
        super().__init__()
        self.total = num_blocks
        self.held: dict[int, int] = {}  # block -> number of references

    def looks(self) -> list[Look]:
        counts: list[Look] = [(name, {}) for name in ("num_free", "num_used", "num_blocks", "utilization")]
        return counts + [("references", {"block": block}) for block in range(self.total)]

    def num_blocks(self) -> Expectation:
        return ExactValue(self.blame("num_blocks"), value=self.total)

    def num_free(self) -> Expectation:
        return ExactValue(self.blame("num_free"), value=self.total - len(self.held))

    def num_used(self) -> Expectation:
        return ExactValue(self.blame("num_used"), value=len(self.held))

    def utilization(self) -> Expectation:
        return ExactValue(self.blame("utilization"), value=len(self.held) / self.total if self.total else 0.0)

    def allocate(self) -> Expectation:
        if len(self.held) == self.total:
            return ExpectedError("BLOCK-03", kinds=("OutOfBlocks",))
        says = f"a block in [0, {self.total}) not among {sorted(self.held)}"
        good = set(range(self.total)) - self.held.keys()
        return AnyOf("BLOCK-02", self.did("allocate", self._take_one), says=says, accepts=lambda block: block in good)

    def allocate_many(self, count: Any) -> Expectation:
        refused = self.did("allocate_many")
        if wrong := not_in_range(count, None, "PositionOutOfRange"):
            return refuse(wrong, lambda: refused(None))
        if count > self.total - len(self.held):
            return refuse([("OutOfBlocks", "BLOCK-07")], lambda: refused(None))
        good = set(range(self.total)) - self.held.keys()
        then = self.did("allocate_many", self._take)
        says = f"{count} different blocks of [0, {self.total}), none of them among {sorted(self.held)}"
        return AnyOf(
            "BLOCK-02", then, says=says, accepts=lambda blocks: len(set(blocks)) == count and set(blocks) <= good,
            length=(count, "BLOCK-07"),
        )  # fmt: skip

    def share(self, block: Any) -> Expectation:
        if block not in self.held:
            return self._refuse_sharing()
        return Expectation("SHARE-01", self.did("share", lambda ok: self.held.update({block: self.held[block] + 1})))

    def free(self, block: Any) -> Expectation:
        if block not in self.held:
            return self.refuse([("BlockNotAllocated", "BLOCK-05")])
        return Expectation("BLOCK-04", self.did("free" if self.held[block] == 1 else "share", lambda ok: self._give(block)))

    def references(self, block: Any) -> Expectation:
        if wrong := not_in_range(block, self.total, "BlockNotAllocated", "SHARE-01"):
            return self.refuse(wrong)
        return ExactValue(self.blame("references"), value=self.held.get(block, 0))

    def _refuse_sharing(self) -> ExpectedError:
        return refuse([("BlockNotAllocated", "SHARE-02")], lambda: self.did("shared nothing")(None))

    def _take_one(self, block: int) -> None:
        self.held[block] = 1

    def _take(self, blocks: Sequence[int]) -> None:
        self.held.update(dict.fromkeys(map(int, blocks), 1))

    def _give(self, block: int) -> None:
        self.held[block] -= 1
        if not self.held[block]:
            del self.held[block]
