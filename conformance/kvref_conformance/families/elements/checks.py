"""Checks of FMT-FP8-01 to FMT-FP8-07 and of FMT-CAST: encoding and decoding of single values."""

from functools import partial

import numpy as np

from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import ClauseViolation
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.formats import small_floats as oracle
from kvref_conformance.testlib.assertions import KeptResults, assert_equal, assert_same, assert_true
from kvref_conformance.testlib.fixtures import NANS, round_to_input_dtype, strided_view
from kvref_conformance.testlib.registry import check
from kvref_conformance.testlib.thread_stress import NUM_THREADS, assert_threads_do_not_interfere

FP8 = ("float8_e4m3fn", "float8_e5m2")
CODES = np.arange(256, dtype=np.uint8)


def every_upper_half(subject: Subject) -> NDArray:
    """Returns every float32 whose lower 16 bits are zero: all exponents, signs and special values, and 7 bits of mantissa.

    If the inputs are float16, it returns every float16.
    """
    if subject.dtype == "float16":
        return oracle.decoded("float16")
    return (np.arange(2**16, dtype=np.uint32) << 16).view(np.float32)


def finite(subject: Subject, values: NDArray) -> NDArray:
    """Returns values rounded to the dtype of the inputs, without those that overflow it."""
    narrow = round_to_input_dtype(subject, values)
    return narrow[np.isfinite(narrow)]


def encode(subject: Subject, values: NDArray, format: str) -> NDArray:
    codes: NDArray = subject.new("elements").encode(values, format)
    return codes


def decode(subject: Subject, codes: NDArray, format: str) -> NDArray:
    values: NDArray = subject.new("elements").decode(codes, format)
    return values


def assert_codes(subject: Subject, values: NDArray, format: str, what: str) -> None:
    got, want = encode(subject, values, format), oracle.encode(values, format)
    differs = np.argwhere(np.asarray(got).astype(np.int64) != want)
    if differs.size:
        i = int(differs[0, 0])
        raise ClauseViolation(
            f"{format} code of {float(values[i])!r} ({what}; {len(differs)} differ)", hex(want[i]), hex(int(got[i]))
        )


@check("FMT-FP8-01", "elements")
def decode_returns_the_value_of_every_code(subject: Subject) -> None:
    for name in subject.formats(*FP8):
        assert_same(decode(subject, CODES, name), oracle.decoded(name), f"values of the 256 {name} codes")


@check("FMT-FP8-02a", "elements")
def encode_rounds_once_to_the_nearest_code(subject: Subject) -> None:
    for name in subject.formats(*FP8):
        values = {
            "the upper halves of float32": every_upper_half(subject),
            "ties and their neighbors": finite(subject, oracle.ties_and_neighbours(name)),
            "random values": finite(subject, subject.rng.normal(size=2000) * oracle.MAX[name] / 8),
        }
        for what, numbers in values.items():
            assert_codes(subject, numbers[np.abs(numbers) <= oracle.MAX[name]], name, what)


@check("FMT-FP8-02b", "elements")
def encode_keeps_the_sign_of_zero(subject: Subject) -> None:
    for name in subject.formats(*FP8):
        tiny = finite(subject, np.array([0.0, -0.0, 1e-30, -1e-30]))
        assert_equal(encode(subject, tiny, name).tolist(), [0x00, 0x80, 0x00, 0x80], f"{name} codes of +-0 and +-1e-30")


@check("FMT-FP8-03", "elements")
def encode_saturates_past_448(subject: Subject) -> None:
    subject.formats("float8_e4m3fn")
    past = finite(subject, np.array([448.0, 463.9, 464.0, 464.00003, 480.0, 6e4, 1e6, 3e38, 3.4028235e38]))
    for sign, code in ((1, 0x7E), (-1, 0xFE)):
        want = np.full(len(past), code, np.uint8)
        assert_same(encode(subject, sign * past, "float8_e4m3fn"), want, f"codes of {sign} * {past.tolist()}")


@check("FMT-FP8-04ab", "elements")
def encode_past_57344_is_infinite(subject: Subject) -> None:
    subject.formats("float8_e5m2")
    near = round_to_input_dtype(
        subject, np.array([57344.0, 57345.0, 61184.0, 61408.0, 61439.996, 61440.0, 65536.0, 3.4028235e38, np.inf])
    )
    for sign, bit in ((1, 0), (-1, 0x80)):
        want = np.where(near < 61440, 0x7B, 0x7C) | bit
        assert_same(encode(subject, sign * near, "float8_e5m2"), want.astype(np.uint8), f"codes of {sign} * {near.tolist()}")


@check("FMT-FP8-05ab", "elements")
def encode_and_decode_keep_nans(subject: Subject) -> None:
    for name in subject.formats(*FP8):
        got = decode(subject, encode(subject, NANS, name), name)
        assert_true(np.isnan(got).all(), f"NaNs encoded and decoded in {name}", "NaN", got)
        encode(subject, np.array([np.inf, -np.inf], np.float32), name)  # raises no error; LAW-14 judges the codes


@check("FMT-FP8-06", "elements")
def encode_of_a_decoded_code_returns_the_code(subject: Subject) -> None:
    for name in subject.formats(*FP8):
        numbers = CODES[~np.isnan(oracle.decoded(name))]
        assert_same(encode(subject, decode(subject, numbers, name), name), numbers, f"{name} codes after decode and encode")


@check("FMT-FP8-07", "elements")
def encode_is_monotonic(subject: Subject) -> None:
    for name in subject.formats(*FP8):
        values = np.concatenate([np.abs(every_upper_half(subject)), finite(subject, oracle.ties_and_neighbours(name))])
        values = np.sort(values[(values >= 0) & (values <= oracle.MAX[name])])
        steps = np.diff(encode(subject, values, name).astype(np.int64))
        if (steps < 0).any():
            i = int(np.argmax(steps < 0))
            raise ClauseViolation(
                f"{name} codes of {values[i]!r} and {values[i + 1]!r}", "ascending codes", f"a difference of {steps[i]}"
            )


@check("FMT-CAST-01ad", "elements")
def cast_rounds_to_nearest_even(subject: Subject) -> None:
    for name in subject.formats("float16", "bfloat16"):
        near = oracle.ties_and_neighbours(name)
        some = [near[:: max(1, len(near) // 20000)], every_upper_half(subject), NANS]
        values = round_to_input_dtype(subject, np.concatenate(some))
        got = decode(subject, encode(subject, values, name), name)
        assert_same(got, oracle.round_to(values, name), f"values cast to {name}")


@check("FMT-CAST-01bc", "elements")
def cast_keeps_subnormals_and_overflows_to_infinity(subject: Subject) -> None:
    cases = {
        "float16": ([2.0**-24, 2.0**-25, 2.0**-25 * 1.0001, 65519.996, 65520.0, -1e30], [2.0**-24, 0.0, 2.0**-24]),
        "bfloat16": ([2.0**-133, 2.0**-134, 2.0**-134 * 1.5, 3.3895e38, 3.4e38, -3.4e38], [2.0**-133, 0.0, 2.0**-133]),
    }
    for name in subject.formats("float16", "bfloat16"):
        values, want = np.array(cases[name][0], np.float32), [*cases[name][1], oracle.MAX[name], np.inf, -np.inf]
        exact = round_to_input_dtype(subject, values) == values
        got = decode(subject, encode(subject, values[exact], name), name)
        assert_same(got, np.array(want, np.float32)[exact], f"{values[exact].tolist()} cast to {name}")


# Checks of laws for this family.


@check("LAW-15", "elements")
def encode_and_decode_accept_views(subject: Subject) -> None:
    for name in subject.formats(*FP8, "float16", "bfloat16"):
        values = finite(subject, subject.rng.normal(size=40))
        codes = encode(subject, values, name)
        kernels = subject.new("elements")
        got = kernels.encode(strided_view(subject, values), name)
        assert_same(got, codes, f"{name} codes of a strided view, compared with a copy")
        got = kernels.decode(strided_view(subject, codes, cast=False), name)
        assert_same(got, decode(subject, codes, name), f"values of a strided view of {name} codes, compared with a copy")


@check("LAW-17", "elements")
def encode_and_decode_results_stay_after_later_calls(subject: Subject) -> None:
    kept, kernels = KeptResults(subject), subject.new("elements")
    for name in subject.formats(*FP8):
        for values in (oracle.decoded(name)[:100], oracle.decoded(name)[20:120]):
            kept.add(f"encode to {name}", kernels.as_is("encode", finite(subject, values), name))
        for codes in (CODES[:100], CODES[20:120]):
            kept.add(f"decode of {name}", kernels.as_is("decode", codes, name))
    kept.assert_unchanged()


@check("LAW-21a", "elements")
def encode_and_decode_in_threads_return_what_they_return_alone(subject: Subject) -> None:
    kernels, formats = subject.new("elements"), subject.formats(*FP8)

    def encode_and_decode(values: NDArray, name: str) -> list[NDArray]:
        codes = kernels.encode(values, name)
        return [codes, kernels.decode(codes, name)]

    given = [finite(subject, subject.rng.normal(size=2000).astype(np.float32)) for _ in range(NUM_THREADS)]
    calls = [[partial(encode_and_decode, values, name) for name in formats] for values in given]
    assert_threads_do_not_interfere(subject, calls, "encode and decode")


@check("LAW-14", "elements")
def encoded_infinity_decodes_to_no_number(subject: Subject) -> None:
    for name in subject.formats(*FP8):
        got = decode(subject, encode(subject, np.array([np.nan, np.inf, -np.inf], np.float32), name), name)
        assert_true(not np.isfinite(got).any(), f"NaN, inf and -inf encoded and decoded in {name}", "no finite value", got)
