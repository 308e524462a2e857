"""Rotated keys, compared with decimals of sixty digits."""

from decimal import Decimal, getcontext

import numpy as np
import pytest

from kvref.backend import backend
from kvref.errors import ConfigError
from kvref.rope import BOUND, LAYOUTS, Rotary, rotary_frequencies

getcontext().prec = 60
UNDERFLOW = 2.0**-149


def rotary(dim, theta=10_000.0, layout="halves"):
    """A rotary embedding over the whole head."""
    return Rotary(dim, rotary_frequencies(dim, theta), layout)


def arctan_of_one_over(n):
    """Euler's series, to full precision."""
    term = total = Decimal(n) / (n * n + 1)
    k = 0
    while abs(term) > Decimal(10) ** -59:
        k += 1
        term *= Decimal(2 * k) / ((2 * k + 1) * (n * n + 1))
        total += term
    return total


TWO_PI = 8 * (4 * arctan_of_one_over(5) - arctan_of_one_over(239))  # Machin: pi / 4 = 4 arctan(1/5) - arctan(1/239)


def cos_and_sin(angle):
    """Power series, for an angle within one full turn."""
    angle = angle % TWO_PI
    sums, term, n = [Decimal(0), Decimal(0)], Decimal(1), 0
    while abs(term) > Decimal(10) ** -55 or n < 20:
        sums[n % 2] += -term if n % 4 > 1 else term
        n += 1
        term = term * angle / n
    return sums


def pairs_of(keys, layout):
    """[..., head_dim] as [..., head_dim / 2, 2], by index arithmetic."""
    dim = keys.shape[-1]
    first = [2 * i if layout == "pairs" else i for i in range(dim // 2)]
    second = [2 * i + 1 if layout == "pairs" else i + dim // 2 for i in range(dim // 2)]
    return np.stack([keys[..., first], keys[..., second]], axis=-1)


def exactly_turned(keys, by, theta, layout):
    """float64 [rows, pairs, 2], each rounded once from sixty digits."""
    pairs = pairs_of(keys, layout)
    turned, dim = np.zeros(pairs.shape), keys.shape[-1]
    for i in range(dim // 2):
        cos, sin = cos_and_sin(by * Decimal(theta) ** (Decimal(-2 * i) / dim))
        for row in range(len(keys)):
            a, b = (Decimal(float(number)) for number in pairs[row, i])
            turned[row, i] = float(a * cos - b * sin), float(b * cos + a * sin)
    return turned


def bound(keys, layout, times=1.0):
    """For each number: BOUND times the length of its pair."""
    length = np.hypot(*np.moveaxis(pairs_of(keys.astype(np.float64), layout), -1, 0))
    return (times * (BOUND * length + UNDERFLOW))[..., None]


@pytest.fixture
def keys(rng=np.random.default_rng(17)):  # noqa: B008 - the same numbers, whichever tests run
    return lambda dim, rows=3: (rng.normal(size=(rows, dim)) * 2.0 ** rng.integers(-20, 20, size=(rows, dim))).astype(np.float32)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim", [2, 6, 64, 128])
@pytest.mark.parametrize("theta", [1.0, 10_000, 500_000.0, 1e9])
def test_one_turn_is_within_the_bound(layout, dim, theta, keys):
    given = keys(dim)
    for by in (1, -1, 7, -300, 4096, -131_072, 2**20):
        got = pairs_of(rotary(dim, theta, layout).turned(given, by).astype(np.float64), layout)
        off = np.abs(got - exactly_turned(given, by, theta, layout))
        assert (off <= bound(given, layout)).all(), by


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("a", "b"), [(3, 4), (-900, 17), (1, -1), (4096, -4096), (-5, 5)])
def test_turns_add_up(layout, a, b, keys):
    made, given = rotary(64, layout=layout), keys(64)
    twice = pairs_of(made.turned(made.turned(given, a), b).astype(np.float64), layout)
    at_once = exactly_turned(given, a + b, 10_000, layout)
    assert (np.abs(twice - at_once) <= bound(given, layout, 1 + 2**0.5 + 1e-6)).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_there_and_back_is_where_it_began(layout, keys):
    made, given = rotary(128, layout=layout), keys(128, 50)
    for by in (1, 2, 63, 1000):
        back = made.turned(made.turned(given, by), -by)
        off = np.abs(pairs_of(back.astype(np.float64) - given, layout))
        assert (off <= bound(given, layout, 1 + 2**0.5 + 1e-6)).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_turn_changes_nothing(layout, keys):
    given = keys(64)
    assert np.array_equal(rotary(64, layout=layout).turned(given, 0), given)


def test_the_first_pair_turns_by_a_radian_and_later_ones_by_less():
    ones = np.tile(np.array([1.0, 0.0], np.float32), 4)  # four pairs, each on the axis
    turned = pairs_of(rotary(8, layout="pairs").turned(ones, 1), "pairs")
    assert np.arctan2(turned[:, 1], turned[:, 0]) == pytest.approx([1.0, 0.1, 0.01, 0.001], rel=1e-6)


def test_layouts_differ_by_where_the_numbers_of_a_pair_stand(keys):
    given = keys(12)
    order = [0, 2, 4, 6, 8, 10, 1, 3, 5, 7, 9, 11]
    pairs, halves = (rotary(12, layout=layout) for layout in ("pairs", "halves"))
    assert np.array_equal(pairs.turned(given, 5)[:, order], halves.turned(given[:, order], 5))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_axes_before_the_last_are_kept(layout, keys):
    given, made = keys(8, 12), rotary(8, layout=layout)
    assert np.array_equal(made.turned(given.reshape(2, 2, 3, 8), 9), made.turned(given, 9).reshape(2, 2, 3, 8))
    assert made.turned(given[:0], 9).shape == (0, 8)
    assert made.turned(given, 9).dtype == np.float32


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strict_arrays_turn_alike(layout, keys):
    strict, given = backend("reference", namespace="array_api_strict"), keys(64)
    made = rotary(64, layout=layout)
    turned = strict.to_numpy(made.turned(strict.asarray(given), -3, strict))
    assert np.array_equal(turned, made.turned(given, -3))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rotated", [2, 6, 16, 17])
def test_a_partial_embedding_is_a_whole_one_over_the_first_numbers(layout, rotated, keys):
    given, count = keys(17), rotated // 2
    got = Rotary(17, rotary_frequencies(2 * count), layout).turned(given, -7)
    assert np.array_equal(got[:, : 2 * count], rotary(2 * count, layout=layout).turned(given[:, : 2 * count], -7))
    assert np.array_equal(got[:, 2 * count :], given[:, 2 * count :])


def test_each_pair_has_its_own_frequency():
    ones = np.tile(np.array([1.0, 0.0], np.float32), 4)
    turned = pairs_of(Rotary(8, [0.5, 0, -2, 1], "pairs").turned(ones, 1), "pairs")
    assert np.arctan2(turned[:, 1], turned[:, 0]) == pytest.approx([0.5, 0.0, -2.0, 1.0], rel=1e-6)


@pytest.mark.torch
@pytest.mark.parametrize("scaling", [
    {"rope_type": "default"},
    {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
], ids=lambda scaling: "-".join(map(str, (scaling["rope_type"], len(scaling)))))  # fmt: skip
def test_moved_keys_are_those_that_transformers_computes_at_the_new_position(scaling, keys):
    """transformers rotates each key at its position. The frequencies that it derives from the configuration move the key."""
    torch = pytest.importorskip("torch")
    llama = pytest.importorskip("transformers.models.gpt_neox.modeling_gpt_neox")
    config = pytest.importorskip("transformers").GPTNeoXConfig(
        hidden_size=64, num_attention_heads=2, max_position_embeddings=256,
        rope_parameters={"rope_theta": 10_000.0, "partial_rotary_factor": 1.0} | scaling,
    )  # fmt: skip
    embedding, plain = llama.GPTNeoXRotaryEmbedding(config), torch.tensor(keys(32))[None, None]

    def at(position):
        cos, sin = embedding(plain, torch.full((1, plain.shape[2]), position))
        return llama.apply_rotary_pos_emb(plain, plain, cos, sin)[1][0, 0].numpy()

    moved = Rotary(32, embedding.inv_freq.double().tolist()).turned(at(90), -40)
    scale = np.abs(moved).max(axis=-1, keepdims=True)
    assert np.abs(moved - at(50)).max() <= 1e-5 * scale.max()


@pytest.mark.parametrize("change", [
    {"head_dim": 1}, {"head_dim": 0}, {"head_dim": -2}, {"head_dim": 2.0}, {"head_dim": None},
    {"frequencies": []}, {"frequencies": [1.0] * 5}, {"frequencies": [float("inf")]}, {"frequencies": [float("nan")]},
    {"frequencies": [True]}, {"frequencies": ["1"]}, {"frequencies": "1"}, {"frequencies": 1.0}, {"frequencies": [10**400]},
    {"frequencies": None}, {"layout": "neox"}, {"layout": ""}, {"layout": None},
])  # fmt: skip
def test_what_makes_no_sense_is_refused(change):
    with pytest.raises(ConfigError, match="frequencies" if change == {"head_dim": 1} else next(iter(change))):
        Rotary(**{"head_dim": 8, "frequencies": [1.0]} | change)


@pytest.mark.parametrize("arguments", [(7,), (0,), (2.0,), (4, 0.0), (4, float("nan")), (4, True), (4, "10000"), (4, None)])
def test_what_has_no_frequencies_is_refused(arguments):
    with pytest.raises(ConfigError, match="theta" if arguments[1:] else "num_rotated"):
        rotary_frequencies(*arguments)
