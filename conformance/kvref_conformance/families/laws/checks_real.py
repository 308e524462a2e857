"""Checks of LAW-18: the laws at production sizes."""

from kvref_conformance.checking.real import DIMS, MODELS, Filled, affordable, edges
from kvref_conformance.checking.registry import law
from kvref_conformance.checking.streams import Stream

LONG = 4100  # tokens: more than every power of two that is tested, and not a multiple of a block
SOME = 300  # tokens, or owners: more than fit in a byte


def filled(stream: Stream, tokens: int, heads: int, dim: int) -> Filled:
    """Returns an empty stream of a new cache with room for `tokens` tokens of these sizes, or of the nearest allowed sizes."""
    return Filled(stream.fresh(**stream.sizes_for(tokens), num_kv_heads=heads, head_dim=dim))


@law("LAW-18", "sizes_for")
def tokens_stay_on_both_sides_of_powers_of_two(stream: Stream) -> None:
    long = filled(stream, LONG, 1, 64)
    for length in edges(affordable(stream.subject, long.room)):
        long.up_to(length)
        if length < 300:  # a token that is lost later is still lost at the last look
            long.look()
    long.look()


@law("LAW-18", "sizes_for")
def rows_of_any_width_are_kept_to_their_end(stream: Stream) -> None:
    for dim in DIMS:
        wide = filled(stream, 64, 3, dim)
        for count in (33, 7):
            wide.append(count)
            wide.look()


@law("LAW-18", "sizes_for")
def hundreds_of_tokens_come_one_by_one(stream: Stream) -> None:
    growing = filled(stream, LONG, 2, 64)
    for length in range(1, min(SOME, growing.room) + 1):
        growing.append(1)
        if length % 64 in (0, 1):
            growing.look()
    growing.look()


@law("LAW-18", "sizes_for")
def hundreds_of_owners_follow_each_other(stream: Stream) -> None:
    passing = filled(stream, 64, 2, 64)
    for number in range(SOME):
        passing.append(affordable(stream.subject, 17 + number % 16, SOME))
        if number % 50 in (0, 49):
            passing.look()
        passing.forget()
    passing.append(20)
    passing.look()


@law("LAW-18", "sizes_for", real=True)
def caches_as_models_have_them_are_filled(stream: Stream) -> None:
    for heads, dim in MODELS:
        model = filled(stream, 2100, heads, dim)
        for count in (1000, 23, 1, 1, 1022, 1, 1, 1):
            model.append(affordable(stream.subject, count, len(MODELS)))
        model.look()


@law("LAW-18", "sizes_for", real=True)
def thousands_of_tokens_come_one_by_one(stream: Stream) -> None:
    growing = filled(stream, LONG, 1, 128)
    while growing.count < min(growing.room, LONG):
        growing.append(1)
        if growing.count % 1024 in (0, 1):
            growing.look()
    growing.look()
