"""Rows, single values, quantized and contiguous caches with limited sizes."""

import re

import numpy as np
import pytest
from restricted import Restricted

import kvref
from kvref_conformance.calls.subject import Subject
from kvref_conformance.clauses import all_clauses
from kvref_conformance.implementations import load_implementation
from kvref_conformance.limits import Limits
from kvref_conformance.runner.check_runner import CheckRunner, Failure, select_checks, verdict_of
from kvref_conformance.runner.options import Effort
from kvref_conformance.runner.verdict import overall_verdict

WHOLE = {"FMT-GROUP-03"}  # needs a width that is not a multiple of the group size
NONE = {each.id for each in all_clauses().values() if re.match("FMT-(GROUP|GGML|MX|SMALL)", each.id)}  # widths below a group size
ROTATED = {each.id for each in all_clauses().values() if re.match("FMT-ROT-0[12356]", each.id)}  # rows without a block to rotate
TAKEN = [
    ({"width": [64, 128]}, set()), ({"width": {"multiple_of": 32}}, set()), ({"width": 4}, NONE),
    ({"width": [5]}, NONE | ROTATED),
    ({"width": 64, "dtype": ["float16"]}, WHOLE), ({"dtype": ["float16", "bfloat16"]}, set()),
]  # fmt: skip
CONTIGUOUS = {
    "exact capacities": (
        {"batch_size": 1, "dtype": ["float16"], "num_kv_heads": 1, "initial_capacity": [16, 64]},
        {"CONTIG-13", "EDIT-07", "EDIT-08"},
    ),
    "nothing reserved": ({"initial_capacity": 0}, set()),
    "as large as it may be": ({"initial_capacity": 64, "max_seq_len": 64}, {"CONTIG-04", "CONTIG-05"}),
    "four rows": ({"batch_size": 4, "head_dim": 64, "dtype": ["bfloat16"]}, set()),
}


def verdicts(implementation, *families, clauses="*"):
    """Verdicts of the clauses with checks in these families, without the state machines."""
    judge = CheckRunner(implementation, Effort(examples=1))
    found = {}
    for clause, checks in select_checks(clauses).items():
        if written := [check for check in checks if check.family in families and check.run]:
            found[clause.id] = verdict_of(judge.judge_clause(written))
    return found


def but(verdict, found):
    return {clause for clause, said in found.items() if said != verdict}


@pytest.mark.extended
@pytest.mark.parametrize(("limits", "missing"), TAKEN, ids=[str(limits) for limits, _ in TAKEN])
def test_rows_and_values_are_judged_in_any_width_and_dtype(limits, missing):
    found = verdicts(Restricted(limits, families=("rows", "elements")), "rows", "elements")
    assert but("passed", found) == missing == {clause for clause, said in found.items() if said == "not offered"}


def test_rows_of_an_even_width_are_not_padded():
    judge, ((_, checks),) = CheckRunner(Restricted({"width": [64]}, families=("rows",))), select_checks("FMT-AFF-06").items()
    assert [outcome.missing for outcome in judge.judge_clause(checks)] == ["", "rows of an odd width"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("wrong", "clause"),
    [(lambda q: np.trunc(q), "FMT-INT8-02"), (lambda q: np.rint(q), "FMT-INT8-02"), (lambda q: q * 0.5, "FMT-INT8-09")],
    ids=["truncated", "half to even", "halved"],
)
def test_a_wrong_rounding_shows_in_a_narrow_dtype(dtype, wrong, clause):
    class Wrong:
        def __init__(self):
            self.right = load_implementation("numpy").rows()
            self.dequantize = self.right.dequantize

        def quantize(self, rows, format):
            _, scale, zero = self.right.quantize(rows, format)
            return wrong(np.float32(rows) / scale[:, None]).astype(np.int8), scale, zero

    implementation = Restricted({"dtype": [dtype]}, families=())
    implementation.formats, implementation.rows = ("int8",), Wrong
    assert but("passed", verdicts(implementation, "rows")) >= {clause}


@pytest.mark.parametrize("name", CONTIGUOUS)
def test_the_contiguous_cache_is_judged_in_the_sizes_it_has(name):
    limits, not_offered = CONTIGUOUS[name]
    found = verdicts(Restricted(limits, families=("contiguous",)), "contiguous")
    assert but("passed", found) == not_offered
    assert "failed" not in found.values()


# of formats that these caches do not have
OF_OTHERS = {"FMT-STATIC-05", "FMT-STATIC-06", "FMT-STATIC-08", "FMT-ROT-04", "FMT-ROT-07"}
ONLY_GROUPS = {
    "of 32": ({"format": ["q8_0", "int4_g32_float16"]}, None, {"QUANT-07"}),
    "one that it has": ({}, ("q8_0",), {"QUANT-07"}),
    "some too wide": ({"format": ["int4_g128_float16", "nvfp4"], "head_dim": [64]}, None, {"QUANT-07"}),
    "far apart": ({"format": ["int4_g128_bfloat16", "q4_1"], "head_dim": {"least": 33}}, None, {"QUANT-07"}),
}


@pytest.mark.parametrize("name", ONLY_GROUPS)
def test_a_quantized_cache_of_groups_alone_is_judged_in_rows_that_they_go_into(name):
    limits, formats, not_offered = ONLY_GROUPS[name]
    found = verdicts(Restricted(limits, families=("quantized",), formats=formats), "quantized")
    assert but("passed", found) == not_offered | OF_OTHERS == {clause for clause, said in found.items() if said == "not offered"}
    assert len(found) - len(not_offered | OF_OTHERS) >= 33


def test_a_latent_cache_of_packed_latents_alone_is_judged_in_whole_tiles():
    found = verdicts(Restricted({"dtype": ["packed"]}, families=("latent",)), "latent")
    assert but("passed", found) == {"MLA-06"}  # of formats that are not among these


def test_sizes_are_sought_that_formats_go_into():
    def nearest(declared, *formats):
        return Limits(declared, formats).nearest("quantized", "head_dim", 5)

    assert nearest({}, "q8_0") == 32
    assert nearest({}, "nvfp4") == 16
    assert nearest({}, "nvfp4", "q8_0", "uint2_g128_float32") == 128  # a multiple of all group sizes
    assert nearest({}, "q8_0", "int8") == 5  # a format without groups
    assert nearest({"head_dim": [16, 48, 64, 96]}, "nvfp4", "q8_0") == 16  # the smallest size, if one is enough
    assert nearest({"head_dim": [40, 96, 64]}, "q8_0", "int4_g64_float16") == 64
    assert nearest({"head_dim": [40, 80]}, "q8_0") == 40  # no size is a multiple
    assert nearest({"format": ["q8_0"]}, "q8_0", "int8") == 32


def test_a_cache_of_groups_alone_that_errs_is_found():
    limits = {"format": ["q4_0"]}

    class Errs:
        def __init__(self, **config):
            self._cache = kvref.QuantizedCache(kvref.QuantizedConfig(**config))

        def __getattr__(self, name):
            return getattr(self._cache, name)

        def append(self, layer, keys, values):
            self._cache.append(layer, values, keys)

    implementation = Restricted(limits, families=())
    implementation.quantized = Errs
    assert {"QUANT-01", "QUANT-03", "QUANT-06", "QUANT-10", "LAW-04"} <= but("passed", verdicts(implementation, "quantized"))


def quantized(**changes):
    """kvref's cache with replaced operations; None removes an operation."""

    class Changed:
        def __init__(self, **config):
            self._cache = kvref.QuantizedCache(kvref.QuantizedConfig(**config))

        def __getattr__(self, name):
            if name in changes:
                raise AttributeError(name)
            return getattr(self._cache, name)

    for name, change in changes.items():
        if change:
            setattr(Changed, name, change)
    implementation = Restricted({}, families=())
    implementation.quantized = Changed
    return implementation


def failing(implementation, clause):
    judge, ((_, checks),) = CheckRunner(implementation), select_checks(clause).items()
    return [check.name for check in checks if check.run and isinstance(judge.judge_check(check), Failure)]


def test_two_ways_of_reading_are_held_against_each_other():
    def next_head(self, layer, position, head):
        return tuple(part[head - 1] for part in self._cache.read_token(layer, position))

    assert failing(quantized(read_token=None), "QUANT-04") == []
    assert failing(quantized(read_token=None, read_head=next_head), "QUANT-04") == ["read operations agree (quantized)"]


def test_a_cache_of_steps_alone_is_judged_in_one_layer():
    def quieter(self, keys, values):
        self._cache.append_step(keys, np.float32(values) * np.float32(0.99))

    steps = {"append": None, "clear": None, "read_tokens": None, "read_token": None, "attend": None, "truncate": None}
    found = verdicts(quantized(**steps), "quantized", clauses="QUANT-*,LAW-04")
    assert but("passed", found) == {"QUANT-04", "QUANT-08"}
    assert "failed" not in found.values()
    for clause in ("QUANT-02", "QUANT-03", "QUANT-05", "QUANT-06", "LAW-04"):
        assert failing(quantized(**steps | {"append_step": quieter}), clause), clause


PAGES = {"paged": "PAGED-18", "prefix": "PREFIX-16", "grouped": "GROUP-08"}


@pytest.mark.parametrize(
    ("limits", "formats"), [({"dtype": ["float16"]}, None), ({"dtype": ["float16"]}, ("float16",)), ({}, ("float32",))], ids=str
)
def test_formats_that_pages_do_not_take_count_in_no_share(limits, formats):
    judge = CheckRunner(Restricted(limits, families=tuple(PAGES), formats=formats))
    for clause, checks in select_checks(",".join(PAGES.values())).items():
        written = [check for check in checks if check.run]
        outcomes = judge.judge_clause(written)
        assert verdict_of(outcomes) == "not offered"
        result = {"clause": clause.id, "verdict": "not offered", "offered": True, "missing": judge.missing(written, outcomes)}
        assert overall_verdict([result]).of == 0, result


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("limits", [{"dtype": ["int8"]}, {"dtype": ["q8_0", "q4"], "head_dim": [64, 128]}], ids=str)
def test_pages_of_formats_with_scales_alone_are_judged_by_what_is_about_these(limits):
    implementation = Restricted(limits, families=tuple(PAGES))
    judge = CheckRunner(implementation, Effort(examples=8))
    for family, clause in PAGES.items():
        found = verdicts(implementation, family)
        assert "failed" not in found.values(), found
        assert found[clause] == "passed"
        assert judge.search(family).findings == {}


def test_what_passes_the_end_of_a_narrow_float_is_kept_as_it_was_handed_in():
    subject = CheckRunner(Restricted({"dtype": ["float16"]}, families=("kernels",))).begin_family("kernels")
    store, rows = np.zeros((2, 1, 1), np.float32), np.float32([[[1e38]], [[0.1]]])
    subject.new("kernels").scatter(store, [0, 1], rows)
    given = subject.call_trace[-1].request.args["new"]
    assert given.ravel().tolist() == [np.inf, 0.0999755859375]  # the float16 nearest to 0.1


class Truncates:
    """Casts to bfloat16 by truncation: right for numbers that bfloat16 can represent."""

    name, version, language, level, formats = "truncates", "1", "python", "exact", ("bfloat16",)

    def asarray(self, values):
        return np.array(values)

    def to_numpy(self, array):
        return array

    def elements(self):
        return self

    def encode(self, values, format):
        return (values.view(np.uint32) >> 16).astype(np.uint16)

    def decode(self, codes, format):
        return (codes.astype(np.uint32) << 16).view(np.float32)


def test_what_numbers_are_cast_to_is_not_what_they_are_handed_in_as():
    assert verdicts(Truncates(), "elements", clauses="FMT-CAST-01") == {"FMT-CAST-01": "failed"}


@pytest.mark.parametrize(("family", "dtype"), [("elements", "float32"), ("rows", "float32"), ("contiguous", "bfloat16")])
def test_formats_are_what_a_cache_is_handed_and_what_a_cast_makes(family, dtype):
    subject = Subject(Truncates(), np.random.default_rng(0), family=family)
    assert subject.dtype == dtype
    limited = Truncates()
    limited.limits = {"dtype": "float32"}
    casts = Subject(limited, np.random.default_rng(0), family="elements")
    assert casts.formats("bfloat16", "float16") == ["bfloat16"]
