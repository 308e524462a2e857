"""Checks of LAW-18: rows of 576 numbers, thousands of tokens, up to 128 heads."""

from collections.abc import Iterator

import numpy as np

from kvref_conformance.checking.attending import normal
from kvref_conformance.checking.content import KEYS, VALUES, content
from kvref_conformance.checking.expect import equal, read, same
from kvref_conformance.checking.real import affordable, edges
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import at_least, formats_of, held, new
from kvref_conformance.conversation.handle import Handle
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.latent.checks import Pair, plain
from kvref_conformance.families.latent.checks_attention import above_zero
from kvref_conformance.families.latent.known import Heads, attends, of_cache
from kvref_conformance.oracle.formats import PACKED, PLAIN
from kvref_conformance.oracle.latent import records_of, row_as

RANK, ROPE, NOPE, VALUE = 512, 64, 128, 128  # the sizes of DeepSeek models
LONG = 4100


def real(subject: Subject, tokens: int, dtype: str, rank: int = RANK) -> Handle:
    return new(subject, "latent", rank=rank, rope_dim=ROPE, max_tokens=tokens, dtype=dtype)


def belonging(cache: Handle, stream: int, positions: range) -> Pair:
    """Returns latents and rope parts whose content identifies their stream and position."""
    rank, rope_dim = cache.config["rank"], cache.config["rope_dim"]
    latent, rope = (content(stream, 0, positions, 1, *each)[:, 0] for each in ((rank, KEYS), (rope_dim, VALUES)))
    return latent, rope


def look(subject: Subject, cache: Handle, pair: Pair, what: str) -> None:
    equal(cache.length, len(pair[0]), f"length of {what}")
    want = row_as(*pair, cache.config["dtype"])
    read(subject, cache.read(), want, f"rows of {what}")


def each_dtype(subject: Subject, tokens: int) -> Iterator[Handle]:
    for dtype in formats_of(subject, "dtype", *PLAIN, PACKED):
        yield real(subject, tokens, dtype)


@check("LAW-18", "latent")
def rows_stay_on_both_sides_of_powers_of_two(subject: Subject) -> None:
    for cache in each_dtype(subject, LONG):
        at, most = 0, affordable(subject, cache.config["max_tokens"], 4)
        given = belonging(cache, 0, range(most))
        for stop in (*edges(most, (16, 64, 256, 1024)), most):
            cache.append(given[0][at:stop], given[1][at:stop])
            at = max(at, stop)
            if stop < 300 or stop == most:
                look(subject, cache, (given[0][:at], given[1][:at]), f"a {cache.config['dtype']} cache of {at} tokens")


@check("LAW-18", "latent")
def hundreds_of_tokens_come_one_by_one(subject: Subject) -> None:
    for cache in each_dtype(subject, 300):
        given = belonging(cache, 0, range(min(300, cache.config["max_tokens"])))
        for at in range(len(given[0])):
            cache.append(given[0][at : at + 1], given[1][at : at + 1])
        look(subject, cache, given, f"a {cache.config['dtype']} cache after appends of one token")


@check("LAW-18", "latent")
def drafts_come_and_go_at_any_length(subject: Subject) -> None:
    for cache in each_dtype(subject, 600):
        at_least(cache, max_tokens=30)
        ends = edges(affordable(subject, cache.config["max_tokens"], 4) - 5, (16, 64, 128, 256, 512))
        given, at = belonging(cache, 0, range(max(ends))), 0
        for end in (*ends, *reversed(ends[::3])):
            cache.append(given[0][at:end], given[1][at:end])
            cache.append(*belonging(cache, 1, range(end, end + 5)))
            cache.truncate(end)
            at = end
        look(subject, cache, (given[0][:at], given[1][:at]), f"a {cache.config['dtype']} cache after drafts")


@check("LAW-18", "latent")
def ranks_are_kept_to_their_end(subject: Subject) -> None:
    for rank in (128, 256, 384, 512, 1024):
        for dtype in formats_of(subject, "dtype", subject.dtype, PACKED):
            cache = real(subject, 40, dtype, rank)
            pair = belonging(cache, 0, range(min(33, cache.config["max_tokens"])))
            cache.append(*pair)
            look(subject, cache, pair, f"a {dtype} cache of {len(pair[0])} tokens with rank {cache.config['rank']}")


@check("LAW-18", "latent")
def thousands_of_records_are_each_its_own(subject: Subject) -> None:
    cache = real(subject, 2100, PACKED)
    pair = belonging(cache, 0, range(affordable(subject, min(2100, cache.config["max_tokens"]))))
    cache.append(*pair)
    look(subject, cache, pair, f"a packed cache of {len(pair[0])} tokens")
    if subject.level == "exact":
        same(cache.records(), records_of(*pair).values, f"records of {len(pair[0])} tokens")


def searched(subject: Subject, cache: Handle, heads: Heads, tokens: int, targets: list[int]) -> None:
    """Attends with queries that each select one token, mainly by its rope part. If that row is lost, the output is another's."""
    rope_dim = cache.config["rope_dim"]
    latent = normal(subject, tokens, cache.config["rank"])
    rope = subject.rng.choice((-1.0, 1.0), size=(tokens, rope_dim)).astype(np.float32)
    cache.append(latent, rope)
    query = held(subject, heads.query(subject, len(targets)) * np.float32(2.0**-6))
    query[:, :, -rope_dim:] = rope[targets, None, :]
    attends(
        subject,
        cache,
        query,
        heads,
        f"attention of queries that each select one of tokens {targets} of {tokens}",
        scale=64 / rope_dim,
    )


@check("LAW-18", "latent")
def every_token_is_found_at_any_length(subject: Subject) -> None:
    for length in (*edges(1025, (64, 128, 256, 1024)), 4097):
        length = affordable(subject, length, 12)
        cache = real(subject, length, dtype_of(subject))
        length = min(length, cache.config["max_tokens"])
        heads = of_cache(subject, cache, count=2, nope=NOPE, value=VALUE)
        targets = sorted({0, 15, 16, 63, 64, 127, 128, 129, 255, 256, 257, length // 2, length - 2, length - 1})
        searched(subject, cache, heads, length, [each for each in targets if 0 <= each < length])


def dtype_of(subject: Subject) -> str:
    return str(plain(subject)["dtype"])


@check("LAW-18", "latent")
def heads_of_real_sizes_attend_within_the_bound(subject: Subject) -> None:
    for dtype in formats_of(subject, "dtype", subject.dtype, PACKED):
        for count, tokens in ((16, 300), (5, 1030)):
            cache = real(subject, tokens, dtype)
            tokens = affordable(subject, min(tokens, cache.config["max_tokens"]), 4)
            heads = of_cache(subject, cache, count=count, nope=NOPE, value=VALUE)
            searched(subject, cache, heads, tokens, [0, tokens // 2, tokens - 1])


@check("LAW-18", "latent")
def sums_over_a_whole_latent_are_in_float32(subject: Subject) -> None:
    """Uses positive numbers only, for a narrow bound, as the check of MLA-02 does."""
    for tokens in (1, 3, 40):
        cache = real(subject, tokens, dtype_of(subject))
        tokens = min(tokens, cache.config["max_tokens"])
        rank, rope_dim = cache.config["rank"], cache.config["rope_dim"]
        cache.append(above_zero(subject, tokens, rank), above_zero(subject, tokens, rope_dim))
        sizes = {"group_size": 2, "nope_dim": NOPE, "value_dim": 16}
        number, nope, value = (subject.size(name, wanted) for name, wanted in sizes.items())
        heads = Heads(above_zero(subject, number, nope, rank), above_zero(subject, number, value, rank), rope_dim)
        query = above_zero(subject, 2, number, heads.width)
        what = f"attention over {tokens} tokens of rank {rank} with positive numbers"
        attends(subject, cache, query, heads, what, scale=8 / (nope * rank))


@check("LAW-18", "latent", real=True)
def as_many_heads_as_deepseek_has(subject: Subject) -> None:
    for dtype in formats_of(subject, "dtype", subject.dtype, PACKED):
        cache = real(subject, 200, dtype)
        heads = of_cache(subject, cache, count=128, nope=NOPE, value=VALUE)
        tokens = affordable(subject, min(200, cache.config["max_tokens"]))
        searched(subject, cache, heads, tokens, [0, tokens // 2, tokens - 1])


@check("LAW-18", "latent", real=True)
def thousands_of_tokens_come_one_by_one(subject: Subject) -> None:
    cache = real(subject, LONG, dtype_of(subject))
    given = belonging(cache, 0, range(cache.config["max_tokens"]))
    for at in range(len(given[0])):
        cache.append(given[0][at : at + 1], given[1][at : at + 1])
    look(subject, cache, given, f"a cache after {len(given[0])} appends of one token")
