"""How many blocks sequences use that can share them: relatives share all that they can, or nothing (TREE-10, SPARSE-08)."""

from collections.abc import Iterable

from kvref_conformance.oracle.expectations import AnyOf, ExactValue, Expectation

Used = tuple[int, int]  # the fewest and the most blocks that can be in use


def count_used(filled: Iterable[tuple[int, int]]) -> Used:
    """Blocks in use. filled: for each sequence, a number that only its relatives have too, and the blocks that it fills."""
    by_relatives: dict[int, list[int]] = {}
    for relatives, blocks in filled:
        by_relatives.setdefault(relatives, []).append(blocks)
    return sum(map(max, by_relatives.values())), sum(map(sum, by_relatives.values()))


def expect_free_blocks(clause: str, num_blocks: int, used: Used) -> Expectation:
    """The expected number of free blocks of a pool."""
    fewest, most = used
    if fewest == most:
        return ExactValue(clause, value=num_blocks - most)
    low, high = max(0, num_blocks - most), num_blocks - fewest
    return AnyOf(clause, range_text=f"a number in [{low}, {high}]", accepts=lambda ok: low <= ok <= high)
