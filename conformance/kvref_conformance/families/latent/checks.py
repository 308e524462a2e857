"""Checks of MLA-01, 03 and 05: one row per token, in the order of the appends."""

from collections.abc import Iterator
from functools import partial

import numpy as np

from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.subject import Subject
from kvref_conformance.families.latent.projections import Projections, attends, exact, of_cache
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats import PACKED, PLAIN
from kvref_conformance.oracle.formats.mla import TILE, records_of, row_as, row_bytes
from kvref_conformance.testlib.assertions import assert_equal, assert_same, assert_within, may_raise, normal, raises, read, shaped
from kvref_conformance.testlib.fixtures import at_least, construct, formats_of, new, random_tokens, round_to_input_dtype, supports
from kvref_conformance.testlib.integer_types import Seen, TypedIntegers, the_same_in_any_type
from kvref_conformance.testlib.production_sizes import affordable, edges
from kvref_conformance.testlib.registry import check
from kvref_conformance.testlib.tagged_content import KEYS, VALUES, content

Pair = tuple[NDArray, NDArray]


def dtypes(subject: Subject) -> list[dict[str, int | str]]:
    """Returns the sizes of a cache of each supported dtype. A packed one has two tiles."""
    sizes: list[dict[str, int | str]] = [{"dtype": name} for name in formats_of(subject, "dtype", *PLAIN, PACKED)]
    return [each | ({"rank": 2 * TILE} if each["dtype"] == PACKED else {}) for each in sizes]


def plain(subject: Subject) -> dict[str, int | str]:
    """Returns the sizes of a cache of the dtype in which arrays are passed, or of a packed cache if that is not supported."""
    return {"dtype": subject.dtype} if supports(subject, "dtype", subject.dtype) else {"dtype": PACKED, "rank": TILE}


def given(subject: Subject, cache: ObjectProxy, count: int) -> Pair:
    """Returns the latents and rope parts of `count` tokens."""
    at_least(cache, max_tokens=count)
    latent, rope = (random_tokens(subject, count, 1, cache.config[name])[:, 0] for name in ("rank", "rope_dim"))
    return latent, rope


def filled(subject: Subject, count: int, **sizes: int | str) -> tuple[ObjectProxy, Pair]:
    """Returns a cache with `count` tokens, and the tokens."""
    cache = new(subject, "latent", **sizes)
    pair = given(subject, cache, count)
    cache.append(*pair)
    return cache, pair


def joined(first: Pair, second: Pair) -> Pair:
    return np.concatenate([first[0], second[0]]), np.concatenate([first[1], second[1]])


def holds(subject: Subject, cache: ObjectProxy, pair: Pair, when: str) -> None:
    """Raises Broken unless the cache contains exactly these tokens."""
    assert_equal(cache.length, len(pair[0]), f"length {when}")
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
    heads = Projections(one.up_keys[:1].repeat(count, axis=0), one.up_values[:1].repeat(count, axis=0), one.rope_dim)
    query = normal(subject, 2, 1, heads.width).repeat(count, axis=1)
    got = attends(subject, cache, query, heads, f"attention of {count} heads with equal matrices and queries")
    _, bound = exact(subject, query, cache.read(), heads, scale=heads.scale)
    assert_within(
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
    assert_within(
        got, alone.swapaxes(0, 1), slack, "the output of a query whose weight is on one token, compared with that token's value"
    )


def latent_of(cache: ObjectProxy) -> NDArray:
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
        assert_equal(cache.num_bytes, 0, f"num_bytes of an empty {dtype} cache")
        held_now = 0
        for count in (1, 4, 2):
            cache.append(*given(subject, cache, count))
            held_now += count
            assert_equal(cache.num_bytes, held_now * row_bytes(rank, rope_dim, dtype), f"num_bytes of {held_now} {dtype} rows")
        cache.truncate(3)
        assert_equal(cache.num_bytes, 3 * row_bytes(rank, rope_dim, dtype), f"num_bytes of 3 {dtype} rows, after truncate(3)")


@check("MLA-03b", "latent")
def heads_that_attend_take_no_memory(subject: Subject) -> None:
    cache, _ = filled(subject, 5, **plain(subject))
    before = cache.num_bytes
    for count in (1, 8):
        heads = of_cache(subject, cache, count=count)
        cache.attend(heads.query(subject, 1), heads.up_keys, heads.up_values, heads.scale, False)
        assert_equal(cache.num_bytes, before, f"num_bytes after attend with {count} heads")


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
        latent, rope = (random_tokens(subject, count, 1, cache.config[name])[:, 0] for name in ("rank", "rope_dim"))
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
        assert_equal(
            (cache.length, len(np.asarray(cache.read()))), (0, 0), "length and number of rows that read returned after clear"
        )
    pair = given(subject, cache, 2)
    cache.append(*pair)
    holds(subject, cache, pair, "after clear and an append of 2 tokens")


# Checks of MLA-02: attention with absorbed matrices equals attention with expanded keys and values.

SHAPES = ((1, 1, 3, 2), (5, 2, 8, 5), (3, 6, 11, 1), (2, 3, 18, 9))  # queries, heads, tokens, value_dim


@check("MLA-02ab", "latent")
def output_is_within_the_bound_of_exact(subject: Subject) -> None:
    for sizes in dtypes(subject):
        for queries, wanted, count, value in SHAPES:
            cache, _ = filled(subject, count, **sizes)
            heads = of_cache(subject, cache, count=wanted, value=value)
            for causal in (False, True):
                for times in (1.0, 3.0):
                    attends(
                        subject, cache, heads.query(subject, queries), heads,
                        f"attention of {queries} queries x {len(heads.up_keys)} heads over {count} {cache.config['dtype']} rows",
                        scale=times * heads.scale, causal=causal,
                    )  # fmt: skip


@check("MLA-02a", "latent")
def matrices_that_are_square_are_not_turned(subject: Subject) -> None:
    cache, _ = filled(subject, 6, **plain(subject))
    rank = cache.config["rank"]
    heads = of_cache(subject, cache, nope=rank, value=rank)
    attends(subject, cache, heads.query(subject, 2), heads, f"attention with up_keys of shape {list(heads.up_keys.shape)}")


@check("MLA-02a", "latent")
def sums_are_added_up_in_float32(subject: Subject) -> None:
    """With positive numbers only, the bound is narrow. The rounding error of a sum in half precision exceeds it by far."""
    for count in (1, 2, 9):
        cache = new(subject, "latent", **plain(subject))
        rank, rope_dim = cache.config["rank"], cache.config["rope_dim"]
        above = partial(above_zero, subject)
        cache.append(above(count, rank), above(count, rope_dim))
        sizes = (subject.size(name, wanted) for name, wanted in (("group_size", 3), ("nope_dim", 40), ("value_dim", 9)))
        number, nope, value = sizes
        heads = Projections(above(number, nope, rank), above(number, value, rank), rope_dim)
        query = above(2, number, heads.width)
        scale = 8 / (nope * rank)
        attends(subject, cache, query, heads, f"attention over {count} tokens of positive numbers", scale=scale)


def above_zero(subject: Subject, *shape: int) -> NDArray:
    """Returns float32 numbers in [0.5, 1.5)."""
    return round_to_input_dtype(subject, subject.rng.uniform(0.5, 1.5, size=shape))


@check("MLA-02b", "latent")
def causal_prefill_in_chunks_agrees(subject: Subject) -> None:
    for sizes in dtypes(subject):
        cache, (latent, rope) = filled(subject, 9, **sizes)
        heads = of_cache(subject, cache)
        query = heads.query(subject, 9)
        want, bound = exact(subject, query, cache.read(), heads, scale=heads.scale, causal=True)
        for size in (9, 1, 2, 4):
            cache.clear()
            for start in range(0, 9, size):
                end = min(start + size, 9)
                cache.append(latent[start:end], rope[start:end])
                got = cache.attend(query[start:end], heads.up_keys, heads.up_values, heads.scale, True)
                assert_within(
                    got, want[start:end], bound[start:end], f"causal attention of tokens [{start}, {end}), in chunks of {size}"
                )


@check("MLA-02c", "latent")
def no_tokens_give_zeros(subject: Subject) -> None:
    cache = new(subject, "latent", **plain(subject))
    heads = of_cache(subject, cache)
    zeros = np.zeros((3, *heads.up_values.shape[:2]), np.float32)
    for causal in (False, True):
        got = cache.attend(heads.query(subject, 3), heads.up_keys, heads.up_values, heads.scale, causal)
        assert_within(got, zeros, 0.0, "attention over 0 tokens")


@check("MLA-02d", "latent")
def what_a_query_does_not_see_has_no_effect(subject: Subject) -> None:
    """Appends a later token that is NaN or infinite, if the cache accepts it."""
    for sizes in dtypes(subject):
        for value in (np.nan, np.inf):
            cache, _ = filled(subject, 5, **sizes)
            heads, rows = of_cache(subject, cache), cache.read()
            with may_raise("NonFinite"):
                cache.append(*(np.full_like(part, value) for part in given(subject, cache, 1)))
                query, what = heads.query(subject, 3), f"causal attention of the two queries before a token of {value}"
                want, bound = exact(subject, query[:2], rows, heads, scale=heads.scale, causal=True)
                got = cache.attend(query, heads.up_keys, heads.up_values, heads.scale, True)
                assert_within(shaped(got, (3, *want.shape[1:]), what)[:2], want, bound, what)


@check("MLA-02a", "latent")
def attending_changes_nothing(subject: Subject) -> None:
    cache, _ = filled(subject, 4, **plain(subject))
    before, heads = cache.read(), of_cache(subject, cache)
    query = heads.query(subject, 2)
    first = attends(subject, cache, query, heads, "attention")
    assert_same(cache.read(), before, "rows after attention")
    _, bound = exact(subject, query, before, heads, scale=heads.scale)
    assert_within(
        attends(subject, cache, query, heads, "attention, second call"),
        first,
        2 * bound,
        "attention of a second call, compared with the first",
    )


# Checks of EDIT for the latent cache: `truncate`.

LOUD = 2.0**8


@check("EDIT-01ac", "latent")
def the_first_tokens_stay(subject: Subject) -> None:
    for sizes in dtypes(subject):
        cache, (latent, rope) = filled(subject, 7, **sizes)
        for length in (6, 3, 0):
            cache.truncate(length)
            holds(
                subject, cache, (latent[:length], rope[:length]), f"of a {cache.config['dtype']} cache after truncate({length})"
            )


@check("EDIT-02ab", "latent")
def no_more_tokens_stay_than_there_are(subject: Subject) -> None:
    cache, pair = filled(subject, 5)
    most = cache.config["max_tokens"]
    for length in subject.integers(6, max(6, most), most + 1, -1, -5, -6):
        with raises("PositionOutOfRange"):
            cache.truncate(length)
        holds(subject, cache, pair, f"after truncate({length}) of 5 tokens raised PositionOutOfRange")
    cache.truncate(5)
    holds(subject, cache, pair, "after truncate(5) of 5 tokens")


@check("EDIT-03", "latent")
def what_follows_is_as_if_nothing_had_gone(subject: Subject) -> None:
    for sizes in dtypes(subject):
        cache, pair = filled(subject, 4, **sizes)
        at_least(cache, max_tokens=8)
        for draft, length, more in ((2, 4, 1), (1, 2, 3), (3, 0, 2), (2, 3, 1)):  # the last keeps one of the draft
            latent, rope = given(subject, cache, draft)
            drafted = round_to_input_dtype(subject, latent * LOUD), round_to_input_dtype(subject, rope * LOUD)
            cache.append(*drafted)
            pair = joined(pair, drafted)
            cache.truncate(length)
            pair = joined((pair[0][:length], pair[1][:length]), given(subject, cache, more))
            cache.append(pair[0][length:], pair[1][length:])
            never = construct(subject, "latent", **cache.config)
            never.append(*pair)
            when = f"of a {cache.config['dtype']} cache after a draft of {draft}, truncate({length}) and an append of {more}"
            assert_same(cache.read(), never.read(), f"rows {when}, compared with a cache without that draft")
            holds(subject, cache, pair, when)


# Checks of LAW-01, LAW-16 and LAW-20 for this family.


@check("LAW-01", "latent")
def tokens_that_do_not_fit_leave_no_trace(subject: Subject) -> None:
    cache, pair = filled(subject, 2, **plain(subject) | {"max_tokens": 4})
    count = cache.config["max_tokens"] - 1
    with raises("CapacityExceeded"):  # one token less would fit
        cache.append(*(random_tokens(subject, count, 1, cache.config[name])[:, 0] for name in ("rank", "rope_dim")))
    holds(subject, cache, pair, "after an append of one token more than fits raised CapacityExceeded")


@check("LAW-16", "latent")
def attending_leaves_its_inputs_alone(subject: Subject) -> None:
    subject.in_this_process()
    cache, _ = filled(subject, 3, **plain(subject))
    heads = of_cache(subject, cache)
    inputs = {"query": heads.query(subject, 2), "up_keys": heads.up_keys, "up_values": heads.up_values}
    own = {name: subject.own(rows) for name, rows in inputs.items()}
    cache.attend(*own.values(), heads.scale, True)
    for name, rows in inputs.items():
        assert_same(subject.numpy(own[name].array), rows, f"the input {name}, after attention")


@check("LAW-20", "latent")
def bytes_are_counted_whatever_the_sizes_are_given_in(subject: Subject) -> None:
    cache = new(subject, "latent", **plain(subject), max_tokens=100)
    latent, rope = given(subject, cache, min(100, cache.config["max_tokens"]))

    def script(typed: TypedIntegers) -> Iterator[Seen]:
        typed_cache = typed.new("latent", **plain(subject), max_tokens=100)
        typed_cache.append(latent, rope)
        yield f"length and num_bytes of {len(latent)} rows", (typed_cache.length, typed_cache.num_bytes)

    the_same_in_any_type(subject, script)


@check("LAW-20", "latent")
def tokens_go_whatever_the_length_is_given_in(subject: Subject) -> None:
    cache = new(subject, "latent", **plain(subject), max_tokens=200)
    latent, rope = given(subject, cache, 170)

    def script(typed: TypedIntegers) -> Iterator[Seen]:
        shrinking = typed.new("latent", **plain(subject), max_tokens=200)
        shrinking.append(latent[:110], rope[:110])
        for time in range(3):
            yield f"truncate(100), call {time + 1}", typed.call(shrinking, "truncate", 100)
            shrinking.append(latent[110:], rope[110:])
            yield f"length after an append of 60, call {time + 1}", shrinking.length
        yield "the rows after truncate and append", shrinking.read()

    the_same_in_any_type(subject, script)


# Checks of MOVE-01: rows are loaded byte for byte, packed ones too.


@check("MOVE-01bc", "latent")
def rows_come_back_byte_for_byte(subject: Subject) -> None:
    for dtype in formats_of(subject, "dtype", *PLAIN, PACKED):
        sizes = {"rank": 2 * TILE} if dtype == PACKED else {}
        cache, _ = filled(subject, 5, dtype=dtype, **sizes)
        loaded, _ = filled(subject, 3, dtype=dtype, **sizes)
        loaded.load(cache.save())
        assert_same(
            np.asarray(loaded.records()),
            np.asarray(cache.records()),
            f"records of {dtype} rows after load, compared with the saved cache",
        )
        more = given(subject, cache, 2)
        for each in (cache, loaded):
            each.append(*more)
        assert_same(loaded.read(), cache.read(), f"{dtype} rows after load and an append of 2, compared with the saved cache")


# Checks of LAW-18: rows of 576 numbers, thousands of tokens, up to 128 heads.

RANK, ROPE, NOPE, VALUE = 512, 64, 128, 128  # the sizes of DeepSeek models
LONG = 4100


def real(subject: Subject, tokens: int, dtype: str, rank: int = RANK) -> ObjectProxy:
    return new(subject, "latent", rank=rank, rope_dim=ROPE, max_tokens=tokens, dtype=dtype)


def belonging(cache: ObjectProxy, stream: int, positions: range) -> Pair:
    """Returns latents and rope parts whose content identifies their stream and position."""
    rank, rope_dim = cache.config["rank"], cache.config["rope_dim"]
    latent, rope = (content(stream, 0, positions, 1, *each)[:, 0] for each in ((rank, KEYS), (rope_dim, VALUES)))
    return latent, rope


def look(subject: Subject, cache: ObjectProxy, pair: Pair, what: str) -> None:
    assert_equal(cache.length, len(pair[0]), f"length of {what}")
    want = row_as(*pair, cache.config["dtype"])
    read(subject, cache.read(), want, f"rows of {what}")


def each_dtype(subject: Subject, tokens: int) -> Iterator[ObjectProxy]:
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
        assert_same(cache.records(), records_of(*pair).values, f"records of {len(pair[0])} tokens")


def searched(subject: Subject, cache: ObjectProxy, heads: Projections, tokens: int, targets: list[int]) -> None:
    """Attends with queries that each select one token, mainly by its rope part. If that row is lost, the output is another's."""
    rope_dim = cache.config["rope_dim"]
    latent = normal(subject, tokens, cache.config["rank"])
    rope = subject.rng.choice((-1.0, 1.0), size=(tokens, rope_dim)).astype(np.float32)
    cache.append(latent, rope)
    query = round_to_input_dtype(subject, heads.query(subject, len(targets)) * np.float32(2.0**-6))
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
        heads = Projections(above_zero(subject, number, nope, rank), above_zero(subject, number, value, rank), rope_dim)
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
