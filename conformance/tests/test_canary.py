"""The canary: its tokens, computed in four independent ways, and its tolerance of rounding."""

import numpy as np
import pytest
from ml_dtypes import bfloat16, float8_e4m3fn, float8_e5m2

from kvref import PagedCache, PagedConfig, get_format, reference
from kvref.canary import BLANK, BOS, FIRST_WORD, Canary, Oracle, weights
from kvref.canary.dimensions import KEY, KEY_ERRORS, LEAK, SHARPNESS
from kvref.canary.oracle import repeated
from kvref.engine import Model
from kvref.errors import ConfigError

RECALLS = {"offsets": (1,), "recalls": True, "theta": 1e6, "head_dim": 128}
CANARIES = {
    "plain": {},
    "one head": {"num_kv_heads": 1},
    "eight heads": {"num_kv_heads": 8, "num_query_heads": 8, "head_dim": 32, "context": 256},
    "three layers": {"offsets": (5, 9, 30)},
    "one layer": {"offsets": (20,)},
    "windows at the offset": {"windows": (16, 31)},
    "one window": {"windows": (None, 40)},
    "wide": {"head_dim": 128, "num_query_heads": 8},
}


def model_of(canary, dtype="float32"):
    sizes = (400, canary.num_layers, canary.num_kv_heads, canary.head_dim, 16)
    model = Model(canary, PagedCache(PagedConfig(*sizes, dtype=dtype)))
    return model, model.cache.create()


def prompt_of(canary, count, seed=0):
    words = np.random.default_rng(seed).permutation(canary.words)[:count] if canary.recalls else None
    words = np.random.default_rng(seed).integers(canary.words, size=count) if words is None else words
    return [BOS, *(int(word) + FIRST_WORD for word in words)]


def said(model, sequence, prompt, count):
    out = [model.step(sequence, prompt)]
    while len(out) < count:
        out.append(model.step(sequence, out[-1:]))
    return out


@pytest.mark.parametrize("sizes", CANARIES.values(), ids=CANARIES)
def test_what_was_said_a_period_ago_is_said_again(sizes):
    canary = Canary(**sizes)
    prompt = prompt_of(canary, canary.period + 5)
    want = repeated(prompt, canary.period, 2 * canary.period)
    assert said(*model_of(canary), prompt, 2 * canary.period) == want
    oracle = Oracle(canary)
    assert [*oracle.extend(prompt), *oracle.generate(want[0], len(want) - 1)][len(prompt) - 1 :] == want


@pytest.mark.parametrize("offsets", [(1,), (3, 1), (2, 2, 1)])
def test_what_came_next_is_recalled(offsets):
    canary = Canary(**RECALLS | {"offsets": offsets})
    prompt = prompt_of(canary, 40)
    later = prompt[1 + len(offsets) + sum(offsets) :]  # tokens of which every layer looks back to positions after begin-of-text
    model, sequence = model_of(canary)
    assert said(model, sequence, [*prompt, later[0]], len(later) - 1) == later[1:]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("sizes", [{}, RECALLS])
def test_stored_in_half_the_bits_it_says_the_same(dtype, sizes):
    canary = Canary(**sizes)
    assert canary.survives(dtype)
    prompt = [*prompt_of(canary, 60), *([prompt_of(canary, 60)[3]] if canary.recalls else [])]
    assert said(*model_of(canary, dtype), prompt, 50) == said(*model_of(canary), prompt, 50)


def test_the_oracle_agrees_with_the_model_wherever_it_is_certain():
    for sizes in (*CANARIES.values(), RECALLS):
        canary = Canary(**sizes)
        tokens = prompt_of(canary, 70, seed=3)
        model, sequence = model_of(canary)
        pairs = [(want, model.step(sequence, [token])) for token, want in zip(tokens, Oracle(canary).extend(tokens), strict=True)]
        assert [got for want, got in pairs if want is not None] == [want for want, _ in pairs if want is not None]
        assert sum(want is not None for want, _ in pairs) > 10


# Each corrupts the cache and the oracle in the same way: (layer 0, head 1, positions [20, 25)).
SPOILT = {
    "values of zeros": (lambda keys, values: (keys, values * 0), {"digit": -1}),
    "keys of zeros": (lambda keys, values: (keys * 0, values), {"at": None}),
}


@pytest.mark.parametrize(("spoil", "told"), SPOILT.values(), ids=SPOILT)
def test_the_oracle_knows_what_a_spoilt_cache_says(spoil, told):
    canary = Canary()
    prompt = prompt_of(canary, canary.period)
    model, sequence = model_of(canary)
    oracle = Oracle(canary)
    before = model.step(sequence, prompt)
    assert oracle.extend(prompt)[-1] == before
    keys, values = (np.array(each) for each in model.cache.gather(sequence, 0))
    for position in range(35, 40):
        keys[position, 1], values[position, 1] = spoil(keys[position, 1], values[position, 1])
        vars(oracle.entries[0][1][position]).update(told)
    model.cache.write(sequence, 0, 0, keys, values)
    got, want = [before], [before]
    for _ in range(50):
        got.append(model.step(sequence, got[-1:]))
        want += oracle.extend(got[-2:-1])
    certain = [(a, b) for a, b in zip(got, want, strict=True) if b is not None]
    assert all(a == b for a, b in certain)
    assert got != repeated(prompt, canary.period, 51)
    assert len(certain) > 40


def test_where_a_head_reads_zeros_it_says_so():
    canary = Canary(offsets=(20,))
    prompt = prompt_of(canary, 30)
    model, sequence = model_of(canary)
    model.step(sequence, prompt)
    keys, values = (np.array(each) for each in model.cache.gather(sequence, 0))
    values[12, 1] = 0
    model.cache.write(sequence, 0, 0, keys, values)
    assert [model.step(sequence, [FIRST_WORD]) for _ in range(3)] == [prompt[11], BLANK, prompt[13]]


@pytest.mark.parametrize("off", [-1, 1])
def test_a_window_that_is_off_by_one_says_other_tokens(off):
    right = Canary(windows=(16, 31))
    prompt = prompt_of(right, right.period)
    model, sequence = model_of(right)
    model.canary = Canary(offsets=(16, 31), windows=(16, 31), num_query_heads=4)
    object.__setattr__(model.canary, "windows", (16 + off, 31))
    assert said(model, sequence, prompt, 40) != repeated(prompt, right.period, 40)


@pytest.mark.parametrize("sizes", [*CANARIES.values(), RECALLS])
def test_the_gap_is_what_the_weights_make_of_every_distance(sizes):
    """Compared with float64 products of the projections: the score of each distance relative to the best."""
    canary = Canary(**sizes)
    made = weights(canary)
    for layer in range(canary.num_layers - canary.recalls):
        query = made[f"model.layers.{layer}.self_attn.q_proj.weight"][: canary.head_dim, 0].astype(float) * 16
        key = made[f"model.layers.{layer}.self_attn.k_proj.weight"][: canary.head_dim, 0].astype(float) * 16
        half = canary.head_dim // 2
        phase = np.exp(1j * np.arange(min(canary.context, canary.windows[layer] or canary.context))[:, None] * canary.frequencies)
        scores = ((query[:half] + 1j * query[half:]) * phase * np.conj(key[:half] + 1j * key[half:])).real.sum(axis=1)
        scores = np.sort(scores / np.sqrt(canary.head_dim))
        assert canary.gap(layer) == pytest.approx((scores[-1] - scores[-2]) / SHARPNESS, rel=1e-4)
        assert canary.margin(layer) < scores[-1] - scores[-2] - np.log(canary.context / LEAK)
        assert scores[-1] * np.sqrt(canary.head_dim) < 65504 / 2


def test_no_format_does_more_to_a_key_than_is_said():
    """The keys of a thousand positions, stored by kvref and by ml_dtypes, with the query that would read them."""
    canary, layer = Canary(), 0
    angle = np.arange(1024)[:, None] * canary.frequencies
    keys = (KEY * np.concatenate([np.cos(angle), np.sin(angle)], axis=1)).astype(np.float32)
    pairs = list(canary.pairs(layer))
    for format in KEY_ERRORS:
        stored = reference.dequantize(reference.quantize(keys, get_format(format)), canary.head_dim, get_format(format))
        error = (stored - keys).astype(float)
        turned = np.hypot(error[:, pairs], error[:, [canary.head_dim // 2 + pair for pair in pairs]]).sum(axis=1)
        done = turned.max() / (KEY * len(pairs))
        assert done <= KEY_ERRORS[format], format
        assert done > 0.2 * KEY_ERRORS[format] or format == "float32", format
    for dtype, name in ((bfloat16, "bfloat16"), (float8_e4m3fn, "float8_e4m3fn"), (float8_e5m2, "float8_e5m2")):
        error = np.abs(keys.astype(dtype).astype(np.float32) - keys)
        assert (error[np.abs(keys) > 0.05] <= KEY_ERRORS[name] * np.abs(keys[np.abs(keys) > 0.05])).all()


REFUSED = {
    "a period longer than the context": ({"context": 40}, "context: expected more than the period, 48, got 40"),
    "no layer": ({"offsets": ()}, "offsets: expected one per layer, each at least 1, got ()"),
    "an offset of none": ({"offsets": (3, 0)}, "offsets: expected one per layer, each at least 1, got (3, 0)"),
    "recalling after an offset of two": (
        {"offsets": (2,), "recalls": True},
        "offsets: expected 1 as the last one, before an induction head",
    ),
    "query heads that share no kv head": ({"num_query_heads": 3}, "num_query_heads: expected a multiple of 2, got 3"),
    "an odd head": ({"head_dim": 63}, "head_dim: expected an even number above 4, got 63"),
    "heads that carry too much": ({"num_kv_heads": 16, "num_query_heads": 16}, "num_kv_heads: expected at most 12, got 16"),
    "a window before the offset": ({"windows": (15, None)}, "windows: expected at least the offset, and at least 2, got 15"),
    "a window too many": ({"windows": (None,) * 3}, "windows: expected one for each of 2 layers, got 3"),
    "no room": ({"num_query_heads": 2, "head_dim": 6}, "num_query_heads * head_dim: expected at least 31 for 2 layers, got 12"),
    "pairs that turn too fast to recall": ({"offsets": (1,), "recalls": True}, "theta, head_dim, context: expected 8 pairs that"),
    "places that look alike": ({"theta": 1.0001}, "layer 0 cannot distinguish positions: expected a larger theta"),
    "more pairs than a head has": ({"num_pairs": 33}, "num_pairs: expected at most 32, got 33"),
    "a context without end": ({"context": 10**12}, "context: expected at most 1048576, got 1000000000000"),
    "a table of turns that is too large": ({"context": 2**20, "head_dim": 256}, "context * head_dim: expected at most 13"),
    "weights of many gigabytes": ({"num_query_heads": 256, "head_dim": 128}, "the sizes: expected at most 536870912 weights,"),
    "a theta of one": ({"theta": 1.0}, "theta: expected a number above 1, got 1.0"),
}


@pytest.mark.parametrize(("sizes", "message"), REFUSED.values(), ids=REFUSED)
def test_sizes_that_make_no_canary_are_refused(sizes, message):
    with pytest.raises(ConfigError) as error:
        Canary(**sizes)
    assert str(error.value).startswith(message)


def test_the_weights_are_as_many_as_it_says():
    for canary in (Canary(), Canary((16, 31), num_kv_heads=4, num_query_heads=8, intermediate_size=128)):
        assert sum(array.size for array in weights(canary).values() if array.ndim == 2) == canary.num_weights


def test_more_pairs_make_a_finer_ruler():
    fine = Canary(num_pairs=32)
    away = np.arange(1024)[np.arange(1024) != 16]
    everything = np.cos((away[:, None] - 16) * 1e4 ** (-2 * np.arange(32) / 64)).mean(axis=1)
    assert fine.gap(0) == pytest.approx(1 - everything.max())
    assert 0 < fine.gap(0) < Canary().gap(0) / 4
    assert fine.survives("float32") and not fine.survives("float8_e4m3fn") and Canary().survives("float8_e4m3fn")
