"""Checks of LAW-03, LAW-12 and LAW-20 for this family."""

from collections.abc import Iterator

from kvref_conformance.checking.expect import equal
from kvref_conformance.checking.integers import Seen, Typed, the_same_in_any_type
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import fitted, new, pair_of_tokens, refused
from kvref_conformance.conversation.subject import Subject


@check("LAW-12a", "pooled")
def a_block_must_fit_the_cache(subject: Subject) -> None:
    refused(subject, "pooled", tokens_per_block=fitted(subject, "pooled")["max_tokens"] + 1)


@check("LAW-20", "pooled")
def blocks_of_tokens_are_as_large_in_any_type(subject: Subject) -> None:
    size = subject.size("tokens_per_block", 50)
    keys, values = pair_of_tokens(subject, 2 * size + 15)

    def script(typed: Typed) -> Iterator[Seen]:
        cache = typed.new("pooled", tokens_per_block=size, max_tokens=2 * size + 10)
        yield f"append of {len(keys)} tokens", typed.call(cache, "append", keys, values)
        yield f"statistics after {len(keys)} tokens", dict(cache.stats())
        yield f"the tokens that remain of {len(keys)}", typed.call(cache, "read")

    the_same_in_any_type(subject, script)


@check("LAW-03c", "pooled")
def buffers_held_and_given_back_add_up(subject: Subject) -> None:
    size = subject.size("tokens_per_block", 3)
    cache = new(subject, "pooled", max_tokens=2 * size + 1)
    for _ in range(12):
        cache.append(*pair_of_tokens(subject, int(subject.rng.integers(0, size + 2))))
        stats = cache.stats()
        live = stats.pool.hits + stats.pool.misses - stats.pool.returns
        equal(live, 2 * stats.num_blocks, "buffers in use in the pool's statistics, compared with 2 per block")
