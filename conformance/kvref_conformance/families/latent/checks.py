"""Checks of MLA-01, 03 and 05: one row per token, in the order of the appends."""

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.checking.attending import normal
from kvref_conformance.checking.expect import equal, raises, read, within
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import at_least, formats_of, new, takes, tokens
from kvref_conformance.conversation.handle import Handle
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.latent.known import Heads, attends, exact, of_cache
from kvref_conformance.oracle.formats import PACKED, PLAIN
from kvref_conformance.oracle.latent import TILE, row_as, row_bytes

Pair = tuple[NDArray, NDArray]


def dtypes(subject: Subject) -> list[dict[str, int | str]]:
    """Returns the sizes of a cache of each supported dtype. A packed one has two tiles."""
    sizes: list[dict[str, int | str]] = [{"dtype": name} for name in formats_of(subject, "dtype", *PLAIN, PACKED)]
    return [each | ({"rank": 2 * TILE} if each["dtype"] == PACKED else {}) for each in sizes]


def plain(subject: Subject) -> dict[str, int | str]:
    """Returns the sizes of a cache of the dtype in which arrays are passed, or of a packed cache if that is not supported."""
    return {"dtype": subject.dtype} if takes(subject, "dtype", subject.dtype) else {"dtype": PACKED, "rank": TILE}


def given(subject: Subject, cache: Handle, count: int) -> Pair:
    """Returns the latents and rope parts of `count` tokens."""
    at_least(cache, max_tokens=count)
    latent, rope = (tokens(subject, count, 1, cache.config[name])[:, 0] for name in ("rank", "rope_dim"))
    return latent, rope


def filled(subject: Subject, count: int, **sizes: int | str) -> tuple[Handle, Pair]:
    """Returns a cache with `count` tokens, and the tokens."""
    cache = new(subject, "latent", **sizes)
    pair = given(subject, cache, count)
    cache.append(*pair)
    return cache, pair


def joined(first: Pair, second: Pair) -> Pair:
    return np.concatenate([first[0], second[0]]), np.concatenate([first[1], second[1]])


def holds(subject: Subject, cache: Handle, pair: Pair, when: str) -> None:
    """Raises Broken unless the cache contains exactly these tokens."""
    equal(cache.length, len(pair[0]), f"length {when}")
    read(subject, cache.read(), row_as(*pair, cache.config["dtype"]), f"rows {when}", cache.config["dtype"])


@check("MLA-01a", "latent")
def a_row_is_the_latent_with_the_rope_part_behind_it(subject: Subject) -> None:
    for sizes in dtypes(subject):
        cache, pair = filled(subject, 7, **sizes)
        holds(subject, cache, pair, f"of a {cache.config['dtype']} cache after an append of 7")


@check("MLA-01c", "latent")
def one_token_gives_what_its_latent_makes(subject: Subject) -> None:
    for sizes in dtypes(subject):
        cache, _ = filled(subject, 1, **sizes)
        for wanted in (1, 3):
            heads = of_cache(subject, cache, count=wanted, value=cache.config["rank"])
            attends(subject, cache, heads.query(subject, 2), heads, f"attention of {wanted} heads over one token")


@check("MLA-01bc", "latent")
def every_head_reads_the_same_row(subject: Subject) -> None:
    cache, _ = filled(subject, 5, **plain(subject))
    one = of_cache(subject, cache, count=1)
    count = subject.size("group_size", 4)
    heads = Heads(one.up_keys[:1].repeat(count, axis=0), one.up_values[:1].repeat(count, axis=0), one.rope_dim)
    query = normal(subject, 2, 1, heads.width).repeat(count, axis=1)
    got = attends(subject, cache, query, heads, f"attention of {count} heads with equal matrices and queries")
    _, bound = exact(subject, query, cache.read(), heads, scale=heads.scale)
    within(
        got, got[:, :1].repeat(count, axis=1), 2 * bound, "the output of each head, compared with the output of the first head"
    )


def pointing(subject: Subject, count: int, width: int) -> NDArray:
    """Returns different rows [count, width] of 1 and -1: each has its largest dot product with itself.

    There are fewer rows if `width` is too small for `count` different ones.
    """
    signs = np.array([[1 - 2 * (at >> bit & 1) for bit in range(width)] for at in range(min(count, 2 ** min(width, 16)))])
    return signs.astype(np.float32)


@check("MLA-01bc", "latent")
def the_rope_part_decides_who_is_looked_at_and_is_in_no_value(subject: Subject) -> None:
    cache = new(subject, "latent", **plain(subject))
    rope = pointing(subject, 6, cache.config["rope_dim"])
    latent, _ = given(subject, cache, len(rope))
    cache.append(latent, rope)
    heads = of_cache(subject, cache)
    query = np.zeros((len(rope), len(heads.up_keys), heads.width), np.float32)
    query[:, :, -rope.shape[1] :] = rope[:, None, :] * np.float32(16)
    got = attends(subject, cache, query, heads, "attention of queries that are zero except for their rope part", scale=1.0)
    alone = latent_of(cache) @ heads.up_values.astype(np.float64).swapaxes(1, 2)  # [heads, tokens, value_dim]
    slack = 1e-2 * np.abs(alone).max() + 1e-2
    within(
        got, alone.swapaxes(0, 1), slack, "the output of a query whose weight is on one token, compared with that token's value"
    )


def latent_of(cache: Handle) -> NDArray:
    """Returns float64 [length, rank]: the latents as `read` returns them."""
    rows: NDArray = np.asarray(cache.read())[:, : cache.config["rank"]].astype(np.float64)
    return rows


@check("MLA-01b", "latent")
def the_latent_decides_too(subject: Subject) -> None:
    cache, _ = filled(subject, 6, **plain(subject))
    heads = of_cache(subject, cache)
    query = heads.query(subject, 3)
    query[:, :, -cache.config["rope_dim"] :] = 0
    attends(subject, cache, query, heads, "attention of queries whose rope part is zero", scale=2 * heads.scale)


@check("MLA-03a", "latent")
def memory_is_what_the_rows_take(subject: Subject) -> None:
    for sizes in dtypes(subject):
        cache = new(subject, "latent", **sizes)
        rank, rope_dim, dtype = (cache.config[name] for name in ("rank", "rope_dim", "dtype"))
        equal(cache.num_bytes, 0, f"num_bytes of an empty {dtype} cache")
        held_now = 0
        for count in (1, 4, 2):
            cache.append(*given(subject, cache, count))
            held_now += count
            equal(cache.num_bytes, held_now * row_bytes(rank, rope_dim, dtype), f"num_bytes of {held_now} {dtype} rows")
        cache.truncate(3)
        equal(cache.num_bytes, 3 * row_bytes(rank, rope_dim, dtype), f"num_bytes of 3 {dtype} rows, after truncate(3)")


@check("MLA-03b", "latent")
def heads_that_attend_take_no_memory(subject: Subject) -> None:
    cache, _ = filled(subject, 5, **plain(subject))
    before = cache.num_bytes
    for count in (1, 8):
        heads = of_cache(subject, cache, count=count)
        cache.attend(heads.query(subject, 1), heads.up_keys, heads.up_values, heads.scale, False)
        equal(cache.num_bytes, before, f"num_bytes after attend with {count} heads")


@check("MLA-05a", "latent")
def tokens_come_in_order(subject: Subject) -> None:
    for sizes in dtypes(subject):
        cache, pair = filled(subject, 1, **sizes)
        for count in (2, 1, 5):
            more = given(subject, cache, count)
            at_least(cache, max_tokens=len(pair[0]) + count)
            cache.append(*more)
            pair = joined(pair, more)
            holds(subject, cache, pair, f"of a {cache.config['dtype']} cache after appends of {len(pair[0])} tokens in total")


@check("MLA-05b", "latent")
def tokens_that_do_not_all_fit_are_not_appended(subject: Subject) -> None:
    cache = new(subject, "latent", **plain(subject) | {"max_tokens": 5})
    most = cache.config["max_tokens"]
    pair = given(subject, cache, most - 1)
    cache.append(*pair)
    for count in (2, 3, most + 1):
        latent, rope = (tokens(subject, count, 1, cache.config[name])[:, 0] for name in ("rank", "rope_dim"))
        with raises("CapacityExceeded"):
            cache.append(latent, rope)
        holds(subject, cache, pair, f"after an append of {count} tokens with room for one raised CapacityExceeded")
    last = given(subject, cache, 1)
    cache.append(*last)
    holds(subject, cache, joined(pair, last), "of a full cache")


@check("MLA-05c", "latent")
def clear_forgets_all(subject: Subject) -> None:
    cache, _ = filled(subject, 5, **plain(subject))
    for _ in range(2):
        cache.clear()
        equal((cache.length, len(np.asarray(cache.read()))), (0, 0), "length and number of rows that read returned after clear")
    pair = given(subject, cache, 2)
    cache.append(*pair)
    holds(subject, cache, pair, "after clear and an append of 2 tokens")
