"""Tagged content: each number identifies its own coordinates, in every dtype, and can be found where it does not belong."""

import ml_dtypes
import numpy as np
import pytest

from kvref_conformance.exceptions import ClauseViolation
from kvref_conformance.families.tiered.tier_model import TierModel, reads_by_age
from kvref_conformance.oracle.formats.per_row import read_as
from kvref_conformance.testlib.tagged_content import (
    KEYS,
    PREFIXES,
    VALUES,
    TokenCoordinates,
    WrittenContent,
    assert_content,
    content_pair,
    describe_row,
    row_at,
    token_content,
)

MASK = 2**32 - 1


def mix(x):
    """lowbias32, in Python's integers."""
    x ^= x >> 16
    x = x * 0x7FEB352D & MASK
    x ^= x >> 15
    x = x * 0x846CA68B & MASK
    return x ^ x >> 16


def number(stream, layer, position, head, element, part):
    row = 0
    for coordinate in (part, stream, layer, head, position):
        row = mix(row ^ (coordinate + 0x9E3779B9 & MASK))
    mixed = mix(row + element * 0x9E3779B9 & MASK)
    sign, exponent = (-1) ** (mixed >> 31), (mixed >> 20 & 7) + (row >> 29) - 8
    return sign * (1 + (mixed & 127) / 128) * 2.0**exponent


def test_each_number_is_a_hash_of_its_place():
    found = token_content(3, 1, [0, 17, 70_000], 2, 5, VALUES)
    for n, position in enumerate((0, 17, 70_000)):
        for head in range(2):
            assert found[n, head].tolist() == [number(3, 1, position, head, element, VALUES) for element in range(5)]


def test_streams_may_be_one_for_each_position():
    found = token_content([PREFIXES, 4], 0, [0, 1], 2, 8, KEYS)
    assert np.array_equal(found[0], token_content(PREFIXES, 0, [0], 2, 8, KEYS)[0])
    assert np.array_equal(found[1], token_content(4, 0, [1], 2, 8, KEYS)[0])


def test_every_plain_dtype_holds_it_to_the_bit():
    keys, values = content_pair(1, 2, range(500), 3, 96)
    for part in (keys, values):
        for dtype in (np.float16, ml_dtypes.bfloat16):
            assert np.array_equal(part.astype(dtype).astype(np.float32), part)
        assert np.abs(part).min() >= 2.0**-8 and np.abs(part).max() < 2.0**7


def test_no_two_rows_are_alike():
    rows = np.concatenate([part.reshape(-1, 16) for layer in (0, 1) for part in content_pair(7, layer, range(2000), 2, 16)])
    assert len(np.unique(rows, axis=0)) == len(rows)


PLACE = TokenCoordinates(3, 0, 17, 1, VALUES)


@pytest.fixture
def written():
    found = WrittenContent(2, 128)
    for stream in range(5):
        for layer in (0, 1):
            found.add_up_to(stream, layer, 100)
    return found


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (lambda own: np.zeros_like(own), "zeros"),
        (lambda own: row_at(TokenCoordinates(2, 1, 33, 0, KEYS), 128),
         "the row of sequence 2, position 33, layer 1, head 0, keys"),
        (lambda own: np.roll(own, 1), "its own row, shifted by 1 element"),
        (lambda own: np.where(np.arange(128) < 96, own, 0), "its own row, but zeros in 32 elements, from 96 to 127"),
        (lambda own: np.where(np.arange(128) < 100, own, 7), "its own row, except 28 elements, from 100 to 127"),
        (lambda own: own * 2, "an unknown row, "),
    ],
)  # fmt: skip
def test_a_wrong_row_is_named(row, said, written):
    assert describe_row(row(row_at(PLACE, 128)), PLACE, written).startswith(said)


def test_the_first_wrong_row_is_told(written):
    keys, values = content_pair(3, 0, range(40), 2, 128)
    values[17, 1] = keys[4, 0]
    with pytest.raises(ClauseViolation) as broken:
        assert_content((keys, values), 3, 0, range(40), written)
    assert broken.value.what == "sequence 3, position 17, layer 0, head 1, values (1 of 80 rows differ)"
    assert broken.value.got == "the row of sequence 3, position 4, layer 0, head 0, keys"


def test_quantized_rows_are_held_against_what_they_read_as(written):
    given = content_pair(0, 0, range(20), 2, 128)
    wanted = read_as(given[0], "int8"), read_as(given[1], "int8")
    got = wanted[0].values, wanted[1].values.copy()
    assert_content(got, 0, 0, range(20), written, True, wanted)
    got[1][19, 1] *= 2
    with pytest.raises(ClauseViolation, match="position 19"):
        assert_content(got, 0, 0, range(20), written, True, wanted)


@pytest.mark.parametrize(("tail", "warm"), [(4, 0), (4, 3), (0, 5), (0, 0), (20, 0)])
@pytest.mark.parametrize("store", ["q4", "int8"])
def test_settled_tokens_are_those_of_the_tiers(tail, warm, store):
    policy = {"tail_length": tail, "tail_dtype": "float16", "warm_length": warm, "warm_format": "q8", "store_format": store}
    policy["max_tokens"] = 20
    tiers = TierModel(**policy)
    keys, values = content_pair(0, 0, range(31), 2, 6)
    tiers.append(keys, values)
    for got, want in zip((reads_by_age(keys, policy), reads_by_age(values, policy)), tiers.read(), strict=True):
        assert np.array_equal(got.values, want.values)
        assert np.array_equal(got.slack, want.slack)
