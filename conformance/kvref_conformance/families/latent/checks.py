"""Checks of MLA-01, 03 and 05: one row per token, in the order of the appends."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.subject import Subject
from kvref_conformance.families.latent.model import Latent
from kvref_conformance.families.latent.projections import Projections, attend_and_compare, expected_output, projections_of_cache
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats import PACKED_FORMAT, PLAIN_FORMATS
from kvref_conformance.oracle.formats.mla import TILE, expected_records, expected_row, row_bytes
from kvref_conformance.testlib.assertions import (
    assert_equal,
    assert_read,
    assert_same,
    assert_shape,
    assert_within,
    blaming,
    may_raise,
    normal_rows,
    raises,
)
from kvref_conformance.testlib.fixtures import (
    new_object,
    random_tokens,
    require_sizes,
    round_to_input_dtype,
    supported_formats,
    supports,
)
from kvref_conformance.testlib.integer_types import Observation, TypedIntegers, assert_same_for_integer_types
from kvref_conformance.testlib.production_sizes import affordable_tokens, power_of_two_edges
from kvref_conformance.testlib.registry import check
from kvref_conformance.testlib.session import Session
from kvref_conformance.testlib.tagged_content import KEYS, VALUES, token_content

Pair = tuple[NDArray, NDArray]
Sizes = dict[str, Any]


def sizes_of_each_dtype(subject: Subject) -> list[Sizes]:
    """Returns the sizes of a cache of each supported dtype. A packed one has two tiles."""
    sizes: list[Sizes] = [{"dtype": name} for name in supported_formats(subject, "dtype", *PLAIN_FORMATS, PACKED_FORMAT)]
    return [each | ({"rank": 2 * TILE} if each["dtype"] == PACKED_FORMAT else {}) for each in sizes]


def default_sizes(subject: Subject) -> Sizes:
    """Returns the sizes of a cache of the dtype in which arrays are passed, or of a packed cache if that is not supported."""
    return {"dtype": subject.dtype} if supports(subject, "dtype", subject.dtype) else {"dtype": PACKED_FORMAT, "rank": TILE}


def random_pair(subject: Subject, cache: ObjectProxy, count: int) -> Pair:
    """Returns the latents and rope parts of `count` tokens."""
    latent, rope = (random_tokens(subject, count, 1, cache.config[name])[:, 0] for name in ("rank", "rope_dim"))
    return latent, rope


def scaled_pair(subject: Subject, pair: Pair, latent: float, rope: float) -> Pair:
    """Returns the pair with each part multiplied by a number."""
    return round_to_input_dtype(subject, pair[0] * np.float32(latent)), round_to_input_dtype(subject, pair[1] * np.float32(rope))


class LatentFixture(Session):
    """A latent cache. The model contains its tokens, which are random."""

    model: Latent

    def __init__(self, subject: Subject, count: int = 0, **sizes: Any) -> None:
        """count: the number of tokens that it contains."""
        super().__init__(subject, **sizes)
        self.append(count)

    @property
    def length(self) -> int:
        return len(self.model.tokens)

    def append(self, count: int, latent: float = 1.0, rope: float = 1.0) -> None:
        """Appends tokens whose parts are multiplied by these numbers. Raises NotOffered if the limits leave no room for them."""
        require_sizes(self.cache, max_tokens=self.length + count)
        if count:
            self.cache.append(*scaled_pair(self.subject, random_pair(self.subject, self.cache, count), latent, rope))


def create_with_tokens(subject: Subject, count: int, **sizes: Any) -> tuple[ObjectProxy, Pair]:
    """Returns a cache with `count` tokens, and the tokens."""
    cache = new_object(subject, "latent", **sizes)
    require_sizes(cache, max_tokens=count)
    pair = random_pair(subject, cache, count)
    cache.append(*pair)
    return cache, pair


def assert_contents(subject: Subject, cache: ObjectProxy, pair: Pair, when: str) -> None:
    """Raises ClauseViolation unless the cache contains exactly these tokens."""
    assert_equal(cache.length, len(pair[0]), f"length {when}")
    assert_read(subject, cache.read(), expected_row(*pair, cache.config["dtype"]), f"rows {when}", cache.config["dtype"])


@check("MLA-01a", "latent")
def read_returns_the_latent_then_the_rope_part(subject: Subject) -> None:
    for sizes in sizes_of_each_dtype(subject):
        cache, pair = create_with_tokens(subject, 7, **sizes)
        assert_contents(subject, cache, pair, f"of a {cache.config['dtype']} cache after an append of 7")


@check("MLA-01c", "latent")
def attend_over_one_token_returns_its_value(subject: Subject) -> None:
    for sizes in sizes_of_each_dtype(subject):
        cache, _ = create_with_tokens(subject, 1, **sizes)
        for wanted in (1, 3):
            heads = projections_of_cache(subject, cache, count=wanted, value=cache.config["rank"])
            attend_and_compare(subject, cache, heads.query(subject, 2), heads, f"attention of {wanted} heads over one token")


@check("MLA-01bc", "latent")
def attend_reads_the_same_rows_for_every_head(subject: Subject) -> None:
    cache, _ = create_with_tokens(subject, 5, **default_sizes(subject))
    single = projections_of_cache(subject, cache, count=1)
    count = subject.size("group_size", 4)
    up_keys, up_values = (matrix[:1].repeat(count, axis=0) for matrix in (single.up_keys, single.up_values))
    heads = Projections(up_keys, up_values, single.rope_dim)
    query = normal_rows(subject, 2, 1, heads.width).repeat(count, axis=1)
    got = attend_and_compare(subject, cache, query, heads, f"attention of {count} heads with equal matrices and queries")
    _, bound = expected_output(subject, query, cache.read(), heads, scale=heads.scale)
    first = got[:, :1].repeat(count, axis=1)
    assert_within(got, first, 2 * bound, "the output of each head, compared with the output of the first head")


def rows_of_signs(count: int, width: int) -> NDArray:
    """Returns different rows [count, width] of 1 and -1: each has its largest dot product with itself.

    There are fewer rows if `width` is too small for `count` different ones.
    """
    signs = np.array([[1 - 2 * (at >> bit & 1) for bit in range(width)] for at in range(min(count, 2 ** min(width, 16)))])
    return signs.astype(np.float32)


@check("MLA-01bc", "latent")
def attend_uses_the_rope_part_for_scores_only(subject: Subject) -> None:
    cache = new_object(subject, "latent", **default_sizes(subject))
    rope = rows_of_signs(6, cache.config["rope_dim"])
    require_sizes(cache, max_tokens=len(rope))
    latent, _ = random_pair(subject, cache, len(rope))
    cache.append(latent, rope)
    heads = projections_of_cache(subject, cache)
    query = np.zeros((len(rope), len(heads.up_keys), heads.width), np.float32)
    query[:, :, -rope.shape[1] :] = rope[:, None, :] * np.float32(16)
    got = attend_and_compare(
        subject, cache, query, heads, "attention of queries that are zero except for their rope part", scale=1.0
    )
    latents = np.asarray(cache.read())[:, : cache.config["rank"]].astype(np.float64)
    values = latents @ heads.up_values.astype(np.float64).swapaxes(1, 2)  # [heads, tokens, value_dim]
    slack = 1e-2 * np.abs(values).max() + 1e-2
    what = "the output of a query whose weight is on one token, compared with that token's value"
    assert_within(got, values.swapaxes(0, 1), slack, what)


@check("MLA-01b", "latent")
def attend_uses_the_latent_for_scores(subject: Subject) -> None:
    cache, _ = create_with_tokens(subject, 6, **default_sizes(subject))
    heads = projections_of_cache(subject, cache)
    query = heads.query(subject, 3)
    query[:, :, -cache.config["rope_dim"] :] = 0
    attend_and_compare(subject, cache, query, heads, "attention of queries whose rope part is zero", scale=2 * heads.scale)


@check("MLA-03a", "latent")
def num_bytes_counts_the_stored_rows(subject: Subject) -> None:
    for sizes in sizes_of_each_dtype(subject):
        fixture = LatentFixture(subject, **sizes)
        for count in (0, 1, 4, 2):
            fixture.append(count)
            fixture.look("num_bytes")
        fixture.cache.truncate(3)
        row = row_bytes(*(fixture.cache.config[name] for name in ("rank", "rope_dim", "dtype")))
        assert_equal(fixture.cache.num_bytes, 3 * row, f"num_bytes of 3 rows of {row} bytes")


@check("MLA-03b", "latent")
def num_bytes_does_not_depend_on_the_heads(subject: Subject) -> None:
    cache, _ = create_with_tokens(subject, 5, **default_sizes(subject))
    before = cache.num_bytes
    for count in (1, 8):
        heads = projections_of_cache(subject, cache, count=count)
        cache.attend(heads.query(subject, 1), heads.up_keys, heads.up_values, heads.scale, False)
        assert_equal(cache.num_bytes, before, f"num_bytes after attend with {count} heads")


@check("MLA-05a", "latent")
def append_adds_rows_in_order(subject: Subject) -> None:
    for sizes in sizes_of_each_dtype(subject):
        fixture = LatentFixture(subject, **sizes)
        for count in (1, 2, 1, 5):
            fixture.append(count)
            fixture.look()


@check("MLA-05b", "latent")
def append_past_the_capacity_appends_nothing(subject: Subject) -> None:
    fixture = LatentFixture(subject, **default_sizes(subject) | {"max_tokens": 5})
    cache, most = fixture.cache, fixture.cache.config["max_tokens"]
    fixture.append(most - 1)
    for count in (2, 3, most + 1):
        with raises("CapacityExceeded"):
            cache.append(*random_pair(subject, cache, count))
        assert_equal(cache.length, most - 1, f"length after an append of {count} tokens with room for one")
        fixture.look()
    fixture.append(1)
    fixture.look()


@check("MLA-05c", "latent")
def clear_removes_all_rows(subject: Subject) -> None:
    fixture = LatentFixture(subject, 5, **default_sizes(subject))
    for _ in range(2):
        fixture.cache.clear()
        lengths = fixture.cache.length, len(np.asarray(fixture.cache.read()))
        assert_equal(lengths, (0, 0), "length and number of rows that read returned after clear")
    fixture.append(2)
    fixture.look()


# Checks of MLA-02: attention with absorbed matrices equals attention with expanded keys and values.

SHAPES = ((1, 1, 3, 2), (5, 2, 8, 5), (3, 6, 11, 1), (2, 3, 18, 9))  # queries, heads, tokens, value_dim


@check("MLA-02ab", "latent")
def attend_is_within_the_error_bound(subject: Subject) -> None:
    for sizes in sizes_of_each_dtype(subject):
        for queries, wanted, count, value in SHAPES:
            cache, _ = create_with_tokens(subject, count, **sizes)
            heads = projections_of_cache(subject, cache, count=wanted, value=value)
            for causal in (False, True):
                for times in (1.0, 3.0):
                    attend_and_compare(
                        subject, cache, heads.query(subject, queries), heads,
                        f"attention of {queries} queries x {len(heads.up_keys)} heads over {count} {cache.config['dtype']} rows",
                        scale=times * heads.scale, causal=causal,
                    )  # fmt: skip


@check("MLA-02a", "latent")
def attend_does_not_transpose_square_matrices(subject: Subject) -> None:
    cache, _ = create_with_tokens(subject, 6, **default_sizes(subject))
    rank = cache.config["rank"]
    heads = projections_of_cache(subject, cache, nope=rank, value=rank)
    attend_and_compare(
        subject, cache, heads.query(subject, 2), heads, f"attention with up_keys of shape {list(heads.up_keys.shape)}"
    )


@check("MLA-02a", "latent")
def attend_adds_sums_in_float32(subject: Subject) -> None:
    for count in (1, 2, 9):
        assert_float32_sums(subject, new_object(subject, "latent", **default_sizes(subject)), count, 3, 40, 9)


def assert_float32_sums(subject: Subject, cache: ObjectProxy, count: int, heads: int, nope: int, value: int) -> None:
    """Appends and attends with positive numbers only, so that the bound is narrow. A sum in half precision exceeds it by far."""

    def positive(*shape: int) -> NDArray:
        return round_to_input_dtype(subject, subject.rng.uniform(0.5, 1.5, size=shape))

    rank, rope_dim = cache.config["rank"], cache.config["rope_dim"]
    cache.append(positive(count, rank), positive(count, rope_dim))
    sizes = {"group_size": heads, "nope_dim": nope, "value_dim": value}
    heads, nope, value = (subject.size(name, wanted) for name, wanted in sizes.items())
    projections = Projections(positive(heads, nope, rank), positive(heads, value, rank), rope_dim)
    query, what = positive(2, heads, projections.width), f"attention over {count} tokens of positive numbers"
    attend_and_compare(subject, cache, query, projections, what, scale=8 / (nope * rank))


@check("MLA-02b", "latent")
def attend_in_causal_chunks_equals_one_call(subject: Subject) -> None:
    for sizes in sizes_of_each_dtype(subject):
        cache, (latent, rope) = create_with_tokens(subject, 9, **sizes)
        heads = projections_of_cache(subject, cache)
        query = heads.query(subject, 9)
        want, bound = expected_output(subject, query, cache.read(), heads, scale=heads.scale, causal=True)
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
def attend_over_no_tokens_returns_zeros(subject: Subject) -> None:
    cache = new_object(subject, "latent", **default_sizes(subject))
    heads = projections_of_cache(subject, cache)
    zeros = np.zeros((3, *heads.up_values.shape[:2]), np.float32)
    for causal in (False, True):
        got = cache.attend(heads.query(subject, 3), heads.up_keys, heads.up_values, heads.scale, causal)
        assert_within(got, zeros, 0.0, "attention over 0 tokens")


@check("MLA-02d", "latent")
def attend_ignores_tokens_after_the_query(subject: Subject) -> None:
    """Appends a later token that is NaN or infinite, if the cache accepts it."""
    for sizes in sizes_of_each_dtype(subject):
        for value in (np.nan, np.inf):
            cache, _ = create_with_tokens(subject, 5, **sizes)
            heads, rows = projections_of_cache(subject, cache), cache.read()
            with may_raise("NonFinite"):
                cache.append(*(np.full_like(part, value) for part in random_pair(subject, cache, 1)))
                query, what = heads.query(subject, 3), f"causal attention of the two queries before a token of {value}"
                want, bound = expected_output(subject, query[:2], rows, heads, scale=heads.scale, causal=True)
                got = cache.attend(query, heads.up_keys, heads.up_values, heads.scale, True)
                assert_within(assert_shape(got, (3, *want.shape[1:]), what)[:2], want, bound, what)


@check("LAW-05c", "latent")
def cleared_rows_have_no_effect_on_attention(subject: Subject) -> None:
    for sizes in sizes_of_each_dtype(subject):
        cache, pair = create_with_tokens(subject, 4, **sizes)
        heads = projections_of_cache(subject, cache)
        with blaming("MLA-02"):
            attend_and_compare(subject, cache, heads.query(subject, 2), heads, "attention in new memory")
        cache.clear()
        with may_raise("NonFinite"):
            cache.append(*(np.full_like(part, np.nan) for part in pair))
        cache.clear()
        cache.append(*random_pair(subject, cache, 3))
        attend_and_compare(subject, cache, heads.query(subject, 2), heads, "attention in memory that contained NaN")


@check("MLA-02a", "latent")
def attend_changes_nothing(subject: Subject) -> None:
    cache, _ = create_with_tokens(subject, 4, **default_sizes(subject))
    before, heads = cache.read(), projections_of_cache(subject, cache)
    query = heads.query(subject, 2)
    first = attend_and_compare(subject, cache, query, heads, "attention")
    assert_same(cache.read(), before, "rows after attention")
    _, bound = expected_output(subject, query, before, heads, scale=heads.scale)
    second = attend_and_compare(subject, cache, query, heads, "attention, second call")
    assert_within(second, first, 2 * bound, "attention of a second call, compared with the first")


# Checks of EDIT for the latent cache: `truncate`.

LOUD = 2.0**8


def concatenate_pairs(first: Pair, second: Pair) -> Pair:
    return np.concatenate([first[0], second[0]]), np.concatenate([first[1], second[1]])


# Checks of LAW-01, LAW-16 and LAW-20 for this family.


@check("LAW-01", "latent")
def append_of_one_token_too_many_changes_nothing(subject: Subject) -> None:
    fixture = LatentFixture(subject, 2, **default_sizes(subject) | {"max_tokens": 4})
    fixture.look()
    with raises("CapacityExceeded"):  # one token less would fit
        fixture.cache.append(*random_pair(subject, fixture.cache, fixture.cache.config["max_tokens"] - 1))
    fixture.look()


@check("LAW-16", "latent")
def attend_does_not_modify_its_inputs(subject: Subject) -> None:
    subject.require_same_process()
    cache, _ = create_with_tokens(subject, 3, **default_sizes(subject))
    heads = projections_of_cache(subject, cache)
    inputs = {"query": heads.query(subject, 2), "up_keys": heads.up_keys, "up_values": heads.up_values}
    own = {name: subject.to_own_array(rows) for name, rows in inputs.items()}
    cache.attend(*own.values(), heads.scale, True)
    for name, rows in inputs.items():
        assert_same(subject.numpy(own[name].array), rows, f"the input {name}, after attention")


@check("LAW-20", "latent")
def new_accepts_every_integer_type(subject: Subject) -> None:
    cache = new_object(subject, "latent", **default_sizes(subject), max_tokens=100)
    latent, rope = random_pair(subject, cache, min(100, cache.config["max_tokens"]))

    def script(typed: TypedIntegers) -> Iterator[Observation]:
        cache_of_type = typed.new("latent", **default_sizes(subject), max_tokens=100)
        cache_of_type.append(latent, rope)
        yield f"length and num_bytes of {len(latent)} rows", (cache_of_type.length, cache_of_type.num_bytes)

    assert_same_for_integer_types(subject, script)


# Checks of MOVE-01: rows are loaded byte for byte, packed ones too.


@check("MOVE-01bc", "latent")
def load_restores_records_byte_for_byte(subject: Subject) -> None:
    for sizes in sizes_of_each_dtype(subject):
        cache, _ = create_with_tokens(subject, 5, **sizes)
        loaded, _ = create_with_tokens(subject, 3, **sizes)
        loaded.load(cache.save())
        what = f"of {sizes['dtype']} rows after load, compared with the saved cache"
        assert_same(np.asarray(loaded.records()), np.asarray(cache.records()), f"records {what}")
        more = random_pair(subject, cache, 2)
        for each in (cache, loaded):
            each.append(*more)
        assert_same(loaded.read(), cache.read(), f"{what}, and an append of 2")


# Checks of LAW-18: rows of 576 numbers, thousands of tokens, up to 128 heads.

RANK, ROPE, NOPE, VALUE = 512, 64, 128, 128  # the sizes of DeepSeek models
LONG = 4100


def production_sizes(tokens: int, dtype: str, rank: int = RANK) -> Sizes:
    return {"rank": rank, "rope_dim": ROPE, "max_tokens": tokens, "dtype": dtype}


def production_fixtures(subject: Subject, tokens: int) -> Iterator[LatentFixture]:
    """Yields an empty cache of each dtype."""
    for dtype in supported_formats(subject, "dtype", *PLAIN_FORMATS, PACKED_FORMAT):
        yield LatentFixture(subject, **production_sizes(tokens, dtype))


def belonging(cache: ObjectProxy, stream: int, positions: range) -> Pair:
    """Returns latents and rope parts whose content identifies their stream and position."""
    rank, rope_dim = cache.config["rank"], cache.config["rope_dim"]
    latent, rope = (token_content(stream, 0, positions, 1, *each)[:, 0] for each in ((rank, KEYS), (rope_dim, VALUES)))
    return latent, rope


def each_dtype(subject: Subject, tokens: int) -> Iterator[ObjectProxy]:
    for dtype in supported_formats(subject, "dtype", *PLAIN_FORMATS, PACKED_FORMAT):
        yield new_object(subject, "latent", **production_sizes(tokens, dtype))


@check("LAW-18", "latent")
def append_up_to_powers_of_two_keeps_all_rows(subject: Subject) -> None:
    for fixture in production_fixtures(subject, LONG):
        most = affordable_tokens(subject, fixture.cache.config["max_tokens"], 4)
        for stop in (*power_of_two_edges(most, (16, 64, 256, 1024)), most):
            fixture.append(max(0, stop - fixture.length))
            if stop < 300 or stop == most:
                fixture.look()


@check("LAW-18", "latent")
def append_one_by_one_keeps_hundreds_of_rows(subject: Subject) -> None:
    for fixture in production_fixtures(subject, 300):
        for _ in range(min(300, fixture.cache.config["max_tokens"])):
            fixture.append(1)
        fixture.look()


@check("LAW-18", "latent")
def truncate_works_at_any_length(subject: Subject) -> None:
    for cache in each_dtype(subject, 600):
        require_sizes(cache, max_tokens=30)
        ends = power_of_two_edges(affordable_tokens(subject, cache.config["max_tokens"], 4) - 5, (16, 64, 128, 256, 512))
        given, at = belonging(cache, 0, range(max(ends))), 0
        for end in (*ends, *reversed(ends[::3])):
            cache.append(given[0][at:end], given[1][at:end])
            cache.append(*belonging(cache, 1, range(end, end + 5)))
            cache.truncate(end)
            at = end
        assert_contents(subject, cache, (given[0][:at], given[1][:at]), f"of a {cache.config['dtype']} cache after drafts")


@check("LAW-18", "latent")
def read_returns_rows_of_every_rank(subject: Subject) -> None:
    for rank in (128, 256, 384, 512, 1024):
        for dtype in supported_formats(subject, "dtype", subject.dtype, PACKED_FORMAT):
            fixture = LatentFixture(subject, **production_sizes(40, dtype, rank))
            fixture.append(min(33, fixture.cache.config["max_tokens"]))
            fixture.look()


@check("LAW-18", "latent")
def records_of_thousands_of_tokens_are_distinct(subject: Subject) -> None:
    cache = new_object(subject, "latent", **production_sizes(2100, PACKED_FORMAT))
    pair = belonging(cache, 0, range(affordable_tokens(subject, min(2100, cache.config["max_tokens"]))))
    cache.append(*pair)
    assert_contents(subject, cache, pair, f"of a packed cache of {len(pair[0])} tokens")
    if subject.level == "exact":
        assert_same(cache.records(), expected_records(*pair).values, f"records of {len(pair[0])} tokens")


def attend_to_single_tokens(subject: Subject, cache: ObjectProxy, heads: Projections, tokens: int, targets: list[int]) -> None:
    """Attends with queries that each select one token, mainly by its rope part. If that row is lost, the output is another's."""
    rope_dim = cache.config["rope_dim"]
    latent = normal_rows(subject, tokens, cache.config["rank"])
    rope = subject.rng.choice((-1.0, 1.0), size=(tokens, rope_dim)).astype(np.float32)
    cache.append(latent, rope)
    query = round_to_input_dtype(subject, heads.query(subject, len(targets)) * np.float32(2.0**-6))
    query[:, :, -rope_dim:] = rope[targets, None, :]
    what = f"attention of queries that each select one of tokens {targets} of {tokens}"
    attend_and_compare(subject, cache, query, heads, what, scale=64 / rope_dim)


@check("LAW-18", "latent")
def attend_finds_every_token_at_any_length(subject: Subject) -> None:
    for length in (*power_of_two_edges(1025, (64, 128, 256, 1024)), 4097):
        length = affordable_tokens(subject, length, 12)
        cache = new_object(subject, "latent", **production_sizes(length, dtype_of(subject)))
        length = min(length, cache.config["max_tokens"])
        heads = projections_of_cache(subject, cache, count=2, nope=NOPE, value=VALUE)
        targets = sorted({0, 15, 16, 63, 64, 127, 128, 129, 255, 256, 257, length // 2, length - 2, length - 1})
        attend_to_single_tokens(subject, cache, heads, length, [each for each in targets if 0 <= each < length])


def dtype_of(subject: Subject) -> str:
    return str(default_sizes(subject)["dtype"])


@check("LAW-18", "latent")
def attend_with_production_heads_is_within_the_bound(subject: Subject) -> None:
    for dtype in supported_formats(subject, "dtype", subject.dtype, PACKED_FORMAT):
        for count, tokens in ((16, 300), (5, 1030)):
            cache = new_object(subject, "latent", **production_sizes(tokens, dtype))
            tokens = affordable_tokens(subject, min(tokens, cache.config["max_tokens"]), 4)
            heads = projections_of_cache(subject, cache, count=count, nope=NOPE, value=VALUE)
            attend_to_single_tokens(subject, cache, heads, tokens, [0, tokens // 2, tokens - 1])


@check("LAW-18", "latent")
def attend_adds_sums_over_a_whole_latent_in_float32(subject: Subject) -> None:
    for tokens in (1, 3, 40):
        cache = new_object(subject, "latent", **production_sizes(tokens, dtype_of(subject)))
        assert_float32_sums(subject, cache, min(tokens, cache.config["max_tokens"]), 2, NOPE, 16)


@check("LAW-18", "latent", real=True)
def attend_with_as_many_heads_as_deepseek_is_within_the_bound(subject: Subject) -> None:
    for dtype in supported_formats(subject, "dtype", subject.dtype, PACKED_FORMAT):
        cache = new_object(subject, "latent", **production_sizes(200, dtype))
        heads = projections_of_cache(subject, cache, count=128, nope=NOPE, value=VALUE)
        tokens = affordable_tokens(subject, min(200, cache.config["max_tokens"]))
        attend_to_single_tokens(subject, cache, heads, tokens, [0, tokens // 2, tokens - 1])


@check("LAW-18", "latent", real=True)
def append_one_by_one_keeps_thousands_of_rows(subject: Subject) -> None:
    fixture = LatentFixture(subject, **production_sizes(LONG, dtype_of(subject)))
    for _ in range(fixture.cache.config["max_tokens"]):
        fixture.append(1)
    fixture.look()
