"""The blocks of ggml: the reference and the oracle compared with ggml's own code, in Python and in C, if installed."""

import numpy as np
import pytest
from restricted import Restricted

from kvref import Quantized, get_format
from kvref_conformance.families.rows.model import Rows
from kvref_conformance.implementations import load_implementation
from kvref_conformance.oracle.adversarial import adversarial_rows
from kvref_conformance.oracle.formats import GGML_FORMATS, MX_FORMATS, NVFP4_FORMATS, ggml, per_row
from kvref_conformance.runner.check_runner import CheckRunner, select_checks, verdict_of

TYPES = [name for name in GGML_FORMATS if name != "iq4_nl"]  # types that gguf can quantize


def written(seed, format):
    """Rows that reveal mistakes, and what the reference stores for them."""
    made = adversarial_rows(np.random.default_rng(seed), 128, format)
    assert not ggml.any_code(made, format).any()
    return made, get_format(format).quantize(made).codes


@pytest.mark.parametrize("format", TYPES)
def test_gguf_writes_the_same_bytes(format):
    quants, types = pytest.importorskip("gguf.quants"), pytest.importorskip("gguf").GGMLQuantizationType
    for seed in range(5):
        made = written(seed, format)[0] + 0.0  # ggml's scale of a row of zeros has the sign of the zeros
        assert (quants.quantize(made, types[format.upper()]) == get_format(format).quantize(made).codes).all()


@pytest.mark.parametrize("format", GGML_FORMATS)
def test_gguf_reads_the_same_values(format):
    quants, types = pytest.importorskip("gguf.quants"), pytest.importorskip("gguf").GGMLQuantizationType
    for seed in range(5):
        made, codes = written(seed, format)
        values = get_format(format).dequantize(Quantized(codes), made.shape[1])
        assert quants.dequantize(codes, types[format.upper()]).tobytes() == values.tobytes()


@pytest.mark.llama
@pytest.mark.parametrize("format", GGML_FORMATS)
def test_ggml_writes_the_same_bytes_and_reads_the_same_values(format):
    from kvref_adapters.llama_cpp.quantizers import LlamaCppRowsPortable

    for seed in range(5):
        made, codes = written(seed, format)
        assert (LlamaCppRowsPortable().quantize(made, format)[0] == codes).all()
        values = get_format(format).dequantize(Quantized(codes), made.shape[1])
        assert LlamaCppRowsPortable().dequantize(codes, None, None, made.shape[1], format).tobytes() == values.tobytes()


@pytest.mark.parametrize(("format", "zero"), [("q4_0", 0x88), ("q5_0", 0)])
def test_zeros_of_either_sign_are_the_same_block(format, zero):
    one, other = (get_format(format).quantize(np.full((1, 32), x, np.float32)).codes for x in (0.0, -0.0))
    assert one.tolist() == other.tolist() and one[0, :2].tolist() == [0, 0x80] and one[0, -1] == zero


@pytest.mark.parametrize(("format", "largest"), [("q8_0", 1e-40), ("q4_0", 1e-40), ("q5_1", 1e-40), ("iq4_nl", 1e-16)])
def test_codes_are_free_where_the_scale_has_no_reciprocal(format, largest):
    """In C they are the result of converting an infinity to an integer."""
    made = np.array([[largest] + [0.0] * 31, [1.0] + [0.0] * 31], np.float32)
    codes = per_row.store(made, format).codes
    assert per_row.inadmissible(made, np.full_like(codes, 3), format)[0][0] == 1  # in the second row, but not in the first
    assert (per_row.store(made, format, np.full_like(codes, 3)).codes == [[3] * 32, codes[1].tolist()]).all()
    assert not ggml.any_code(np.zeros((1, 32)), format).any() or format == "iq4_nl"


def test_rows_that_are_changed_are_seen_in_formats_of_groups_too():
    right = load_implementation("numpy").rows()

    class Changes:
        dequantize = right.dequantize

        def quantize(self, rows, format):
            stored = right.quantize(rows, format)
            rows[:] = 0
            return stored

    implementation, ((_, checks),) = Restricted(families=(), formats=("q8_0",)), select_checks("LAW-16", "rows").items()
    implementation.rows = Changes
    assert verdict_of(CheckRunner(implementation).judge_clause(checks)) == "failed"


@pytest.mark.parametrize("format", [*MX_FORMATS, *NVFP4_FORMATS])
def test_a_trace_has_scales_that_are_codes_as_codes(format):
    stored = get_format(format).quantize(adversarial_rows(np.random.default_rng(0), 32, format)[:5])
    codes, scale, zero = Rows().quantize(adversarial_rows(np.random.default_rng(0), 32, format)[:5], format).to_json()["ok"]
    assert scale.dtype == np.uint8 and (scale == stored.scale).all() and (codes == stored.codes).all() and zero is None
