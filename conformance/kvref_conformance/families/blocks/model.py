"""The block pool as a set of blocks in use."""

from typing import Any, ClassVar

from kvref_conformance.oracle.expected import (
    Choice,
    Expected,
    Refused,
    Value,
    not_in_range,
    refuse,
)  # fmt: skip
from kvref_conformance.oracle.model import Look, Model


class Blocks(Model):
    family = "blocks"
    blamed: ClassVar = {
        ("new", "num_free"): "BLOCK-01", ("allocate", "num_free"): "BLOCK-02", ("free", "num_free"): "BLOCK-04",
        ("allocate_many", "num_free"): "BLOCK-07",
        "num_blocks": "BLOCK-01", "num_used": "LAW-03", "utilization": "BLOCK-06",
    }  # fmt: skip
    blamed_after_refusal = "BLOCK-05"

    def __init__(self, *, num_blocks: int) -> None:
        super().__init__()
        self.total = num_blocks
        self.held: set[int] = set()

    def looks(self) -> list[Look]:
        return [(name, {}) for name in ("num_free", "num_used", "num_blocks", "utilization")]

    def num_blocks(self) -> Expected:
        return Value(self.blame("num_blocks"), value=self.total)

    def num_free(self) -> Expected:
        return Value(self.blame("num_free"), value=self.total - len(self.held))

    def num_used(self) -> Expected:
        return Value(self.blame("num_used"), value=len(self.held))

    def utilization(self) -> Expected:
        return Value(self.blame("utilization"), value=len(self.held) / self.total if self.total else 0.0)

    def allocate(self) -> Expected:
        if len(self.held) == self.total:
            return Refused("BLOCK-03", kinds=("OutOfBlocks",))
        says = f"a block in [0, {self.total}) not among {sorted(self.held)}"
        good = set(range(self.total)) - self.held
        return Choice("BLOCK-02", self.did("allocate", self.held.add), says=says, accepts=lambda block: block in good)

    def allocate_many(self, count: Any) -> Expected:
        refused = self.did("allocate_many")
        if wrong := not_in_range(count, None, "PositionOutOfRange"):
            return refuse(wrong, lambda: refused(None))
        if count > self.total - len(self.held):
            return refuse([("OutOfBlocks", "BLOCK-07")], lambda: refused(None))
        good = set(range(self.total)) - self.held
        then = self.did("allocate_many", self.held.update)
        says = f"{count} different blocks of [0, {self.total}), none of them among {sorted(self.held)}"
        return Choice(
            "BLOCK-02", then, says=says, accepts=lambda blocks: len(set(blocks)) == count and set(blocks) <= good,
            length=(count, "BLOCK-07"),
        )  # fmt: skip

    def free(self, block: Any) -> Expected:
        if block not in self.held:
            return self.refuse([("BlockNotAllocated", "BLOCK-05")])
        return Expected("BLOCK-04", self.did("free", lambda ok: self.held.remove(block)))
