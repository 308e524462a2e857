"""LAW-20: what the laws say of this family alone."""

from collections.abc import Iterator

from kvref_conformance.checking.integers import Seen, Typed, the_same_in_any_type
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import pair_of_tokens
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.contiguous.stream import ContiguousStream


@check("LAW-20", "contiguous")
def tokens_are_counted_in_any_type(subject: Subject) -> None:
    def advancing(typed: Typed) -> Iterator[Seen]:
        cache = typed.new("contiguous", max_seq_len=300, initial_capacity=300)
        for time in range(4):
            yield f"advance(100), time {time + 1}", typed.call(cache, "advance", 100)
            yield f"seq_len after advance(100), time {time + 1}", cache.seq_len

    the_same_in_any_type(subject, advancing)


@check("LAW-20", "contiguous")
def growth_is_counted_in_any_type(subject: Subject) -> None:
    keys, values = map(ContiguousStream(subject).laid_out, pair_of_tokens(subject, 110))

    def growing(typed: Typed) -> Iterator[Seen]:
        cache = typed.new("contiguous", max_seq_len=120, initial_capacity=100)
        yield "appending 110 tokens", typed.call(cache, "append", keys, values)
        yield "capacity of 110 tokens", cache.capacity
        yield "110 tokens", typed.call(cache, "read")

    the_same_in_any_type(subject, growing)
