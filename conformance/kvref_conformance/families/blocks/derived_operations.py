"""Derived operations of the block pool."""

from functools import partial

from kvref_conformance.calls.derived_operations import DerivedOperation, call_in_order
from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.exceptions import NotOffered


def allocate_one_by_one(pool: ObjectProxy, count: int) -> list[int]:
    if count < 0:
        raise NotOffered("allocate_many of a negative number (derived from allocate)")
    blocks = list[int]()
    call_in_order(partial(lambda: blocks.append(pool.allocate())) for _ in range(count))
    return blocks


def utilization_of_counts(pool: ObjectProxy) -> float:
    total, free = pool.config["num_blocks"], pool.num_free
    return (total - free) / total if total else 0.0


def num_free_of_utilization(pool: ObjectProxy) -> int:
    total = pool.config["num_blocks"]
    return int(total - round(total * pool.utilization))


DERIVED = (
    DerivedOperation("num_blocks", "BLOCK-01", ("num_free", "num_used"), lambda pool: pool.num_free + pool.num_used),
    DerivedOperation("num_free", "LAW-03", ("num_used",), lambda pool: pool.config["num_blocks"] - pool.num_used),
    DerivedOperation("num_free", "BLOCK-06", ("utilization",), num_free_of_utilization),
    DerivedOperation("num_used", "LAW-03", ("num_free",), lambda pool: pool.config["num_blocks"] - pool.num_free),
    DerivedOperation("utilization", "BLOCK-06", ("num_free",), utilization_of_counts),
    DerivedOperation("allocate_many", "BLOCK-07", ("allocate",), allocate_one_by_one),
    DerivedOperation("allocate", "BLOCK-07", ("allocate_many",), lambda pool: pool.allocate_many(1)[0]),
)
