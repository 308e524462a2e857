"""Checks of LAW-20 for this family."""

from collections.abc import Iterator

import numpy as np

from kvref_conformance.checking.integers import Seen, Typed, the_same_in_any_type
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import at_least, batch_major, fitted, pair_of_tokens, tokens
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.contiguous.stream import ContiguousStream


@check("LAW-20", "contiguous")
def tokens_are_counted_in_any_type(subject: Subject) -> None:
    def advancing(typed: Typed) -> Iterator[Seen]:
        cache = typed.new("contiguous", max_seq_len=300, initial_capacity=300)
        for time in range(4):
            yield f"advance(100), call {time + 1}", typed.call(cache, "advance", 100)
            yield f"seq_len after advance(100), call {time + 1}", cache.seq_len

    the_same_in_any_type(subject, advancing)


@check("LAW-20", "contiguous")
def growth_is_counted_in_any_type(subject: Subject) -> None:
    keys, values = map(ContiguousStream(subject).laid_out, pair_of_tokens(subject, 110))

    def growing(typed: Typed) -> Iterator[Seen]:
        cache = typed.new("contiguous", max_seq_len=120, initial_capacity=100)
        yield "append of 110 tokens", typed.call(cache, "append", keys, values)
        yield "capacity at 110 tokens", cache.capacity
        yield "110 tokens", typed.call(cache, "read")

    the_same_in_any_type(subject, growing)


@check("LAW-20", "contiguous")
def tokens_go_in_any_type(subject: Subject) -> None:
    keys, values = map(ContiguousStream(subject).laid_out, pair_of_tokens(subject, 110))

    def going_back(typed: Typed) -> Iterator[Seen]:
        cache = typed.new("contiguous", max_seq_len=300, initial_capacity=100)
        at_least(cache, max_seq_len=160)
        cache.append(keys, values)
        for time in range(3):
            yield f"truncate(100), call {time + 1}", typed.call(cache, "truncate", 100)
            cache.append(keys[:, :, :60], values[:, :, :60])
            yield f"seq_len after an append of 60, call {time + 1}", cache.seq_len
        yield "160 tokens", typed.call(cache, "read")

    the_same_in_any_type(subject, going_back)


@check("LAW-20", "contiguous")
def rows_are_named_in_any_type(subject: Subject) -> None:
    subject.need(batch_size=2)
    batch = fitted(subject, "contiguous", batch_size=3)["batch_size"]
    keys, values = (np.concatenate([batch_major(tokens(subject, 2)) for _ in range(batch)]) for _ in ("keys", "values"))

    def turning(typed: Typed) -> Iterator[Seen]:
        cache = typed.new("contiguous", batch_size=3)
        at_least(cache, max_seq_len=2)
        cache.append(keys, values)
        rows = [*range(1, batch), 0]
        yield f"reorder({rows})", typed.call(cache, "reorder", rows)
        yield f"tokens after reorder({rows})", typed.call(cache, "read")

    the_same_in_any_type(subject, turning)
