"""Checks of LAW-10, LAW-16 and LAW-20 for this family."""

from collections.abc import Iterator

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.checking.expect import raises, same
from kvref_conformance.checking.integers import Seen, Typed, the_same_in_any_type
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import pair_of_tokens, tokens
from kvref_conformance.conversation.subject import Subject


def query_of(subject: Subject, count: int) -> NDArray:
    """Returns float32 [count, num_query_heads, dim], with one query head per kv head if the limits allow it."""
    return tokens(subject, count, heads=subject.heads * subject.size("group_size", 1))


@check("LAW-16", "attention")
def attention_leaves_its_inputs_alone(subject: Subject) -> None:
    subject.in_this_process()
    given = {"query": query_of(subject, 2), "keys": tokens(subject, 4), "values": tokens(subject, 4)}
    own = {name: subject.own(rows) for name, rows in given.items()}
    subject.new("attention").attention(*own.values(), scale=0.5, causal=True, length=3)
    for name, rows in given.items():
        same(subject.numpy(own[name].array), rows, f"the input {name}, after attention")


@check("LAW-10", "attention")
def attention_refuses_shapes_that_do_not_fit(subject: Subject) -> None:
    query, keys, values, heads = query_of(subject, 1), tokens(subject, 4), tokens(subject, 4), subject.heads
    wide, fewer, uneven = tokens(subject, 4, dim=subject.dim + 1), tokens(subject, 3), np.append(query, query[:, :1], axis=1)
    other_heads, flat, nothing = tokens(subject, 4, heads=heads - 1 or 2), values[..., 0], slice(0)
    for wrong in ((query, wide, values), (query, keys, fewer), (uneven, keys, values), (query[0], keys, values),
                  (query, keys, other_heads), (query, keys, flat), (query[..., nothing], keys[..., nothing], values),
                  (query, keys, values[..., nothing])):  # fmt: skip
        if wrong[0] is uneven and heads == 1:
            continue  # any number of query heads can read one kv head
        with raises("ShapeMismatch"):
            subject.new("attention").attention(*wrong, scale=1.0, causal=False, length=4)


@check("LAW-20", "attention")
def a_length_may_be_of_any_type(subject: Subject) -> None:
    query, (keys, values) = query_of(subject, 1), pair_of_tokens(subject, 120)

    def script(typed: Typed) -> Iterator[Seen]:
        given = {"scale": 1.0, "causal": False, "length": 100}
        yield "attention over 100 tokens", typed.call(subject.new("attention"), "attention", query, keys, values, **given)

    the_same_in_any_type(subject, script)
