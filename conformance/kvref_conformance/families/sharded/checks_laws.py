"""LAW-20: a law in the form that applies to this family only."""

from collections.abc import Iterator

from kvref_conformance.checking.integers import Seen, Typed, the_same_in_any_type
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import at_least, fitted, pair_of_tokens
from kvref_conformance.conversation.subject import Subject

SIZES = {"token_ranks": 2, "block_size": 8, "num_blocks": 20}


@check("LAW-20", "sharded")
def tokens_go_in_any_type(subject: Subject) -> None:
    keys, values = pair_of_tokens(subject, 110)

    def going_back(typed: Typed) -> Iterator[Seen]:
        cache = typed.new("sharded", **SIZES)
        config = cache.config
        at_least(cache, num_blocks=-(-160 // (config["block_size"] * config["token_ranks"])))
        cache.append(keys, values)
        for time in range(3):
            yield f"truncate(100), call {time + 1}", typed.call(cache, "truncate", 100)
            cache.append(keys[:60], values[:60])
            yield f"length after an append of 60, call {time + 1}", cache.length
        yield "160 tokens", typed.call(cache, "read")

    the_same_in_any_type(subject, going_back)


@check("LAW-20", "sharded")
def ranks_are_named_in_any_type(subject: Subject) -> None:
    config = fitted(subject, "sharded", **SIZES)
    ranks = config["head_ranks"] * config["token_ranks"]
    keys, values = pair_of_tokens(subject, 20)

    def naming(typed: Typed) -> Iterator[Seen]:
        cache = typed.new("sharded", **SIZES)
        cache.append(keys, values)
        for name in ("heads", "positions", "block_table", "num_bytes", "read_rank"):
            yield f"{name}({ranks - 1})", typed.call(cache, name, ranks - 1)
        yield f"lose({ranks - 1})", typed.call(cache, "lose", ranks - 1)
        yield f"second call of lose({ranks - 1})", typed.call(cache, "lose", ranks - 1)
        yield "read of a cache that lost a rank", typed.call(cache, "read")

    the_same_in_any_type(subject, naming)
