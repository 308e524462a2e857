"""Checks of LAW-18: blocks that are evicted and allocated again many times."""

from kvref_conformance.checking.content import Written, belongs, pair_of_content
from kvref_conformance.checking.expect import equal
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import new
from kvref_conformance.conversation.subject import Subject


@check("LAW-18", "pooled")
def the_oldest_blocks_go_hundreds_of_times(subject: Subject) -> None:
    for size, heads, dim in ((16, 1, 64), (32, 2, 80), (64, 1, 128)):
        cache = new(subject, "pooled", num_kv_heads=heads, head_dim=dim, tokens_per_block=size, max_tokens=520)
        config, at, first = cache.config, 0, 0
        written = Written(config["num_kv_heads"], config["head_dim"])
        for count in (1, 15, 129, 400, *(7 for _ in range(60)), 257, 1, 33):
            cache.append(*pair_of_content(0, 0, range(at, at + count), written.heads, written.dim))
            at += count
            while at - first > config["max_tokens"]:
                first += config["tokens_per_block"]
            written.up_to(0, 0, at)
            equal(
                cache.total_tokens, at - first, f"tokens that remain of {at}, with tokens_per_block {config['tokens_per_block']}"
            )
        belongs(cache.read(), 0, 0, range(first, at), written)
