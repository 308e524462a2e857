"""Declared limits: their syntax, that every clause is judged within them, and that an implementation must keep them."""

import re

import numpy as np
import pytest
from restricted import LIMITS, Restricted

from kvref_conformance.exceptions import CannotRun, NotOffered
from kvref_conformance.families import all_families
from kvref_conformance.implementations import validate_implementation
from kvref_conformance.limits import Limit, Limits, LimitsError
from kvref_conformance.oracle.formats import SCALED_FORMATS, describe_formats
from kvref_conformance.oracle.model_runner import EXPECTED_OBJECT
from kvref_conformance.runner.check_runner import CheckRunner, Failure, select_checks, verdict_of
from kvref_conformance.runner.options import Effort
from kvref_conformance.testlib.fixtures import new_object

TWO_TOKENS = {"LAW-06": "tokens 2, where its limits say at most 1"}
NEGATIVE = "negative integers: its integer types are unsigned"
ROWS = "int8 or float8_e4m3fn or float8_e5m2 or q8 or q4"
TOKEN_BY_TOKEN = (
    "channels", "contiguous", "grouped", "latent", "paged", "pooled", "prefix", "quantized", "sharded", "tiered", "windowed",
)  # fmt: skip
OF_BFLOAT16 = "format packed"  # a part of it is bfloat16
STATIC_PAGES = ["FMT-STATIC-05", "FMT-STATIC-06"]
GIVEN = "dtype float8_e4m3fn_static or float8_e5m2_static, where its limits say {}"
ANY = "int8 or float8_e4m3fn or float8_e5m2 or 76 others"  # formats with a scale
EXCEPTIONS = {  # clauses that cannot be judged for a family within a limit, with the reason
    ("one kv head", "quantized"): dict.fromkeys(("QUANT-03", "FMT-ROT-04"), "num_kv_heads 2, where its limits say 1"),
    ("blocks of 1", "sharded"): {"EDIT-03": "room for 8 tokens, where its limits leave 7"},
    ("one kv head", "tiered"): {"TIER-11": "num_kv_heads 2, where its limits say 1"},
    ("one sequence at a time", "paged"): {  # shared blocks need two sequences
        **dict.fromkeys(
            ("LAW-07", "SHARE-03", "SHARE-04", "SHARE-05", "SHARE-07", "SHARE-08"), "sequences 2, where its limits say at most 1"
        ),
        **dict.fromkeys(("SHARE-06", "SHARE-09", "EDIT-05"), "sequences 3, where its limits say at most 1"),
    },
    ("one sequence at a time", "grouped"): dict.fromkeys(
        ("LAW-07", "SHARE-03", "PREFIX-03"), "sequences 2, where its limits say at most 1"
    ),
    **{("one token at a time", family): TWO_TOKENS for family in TOKEN_BY_TOKEN},
    ("one token at a time", "pruned"): TWO_TOKENS,
    ("one token at a time", "tree"): TWO_TOKENS,
    ("one token at a time", "sparse"): TWO_TOKENS,
    ("one token at a time", "compressed"): TWO_TOKENS,
    ("one kv head", "pruned"): {"PRUNED-03": "num_kv_heads 2, where its limits say 1"},
    ("one token at a time", "channels"): TWO_TOKENS | {"KIVI-04": TWO_TOKENS["LAW-06"]},
    **{  # only latent and windowed caches take packed rows or codes
        (f"{dtype} only", family): {
            clause: OF_BFLOAT16 if (dtype, wanted) == ("float16", "packed") else f"dtype {wanted}, where its limits say {dtype}"
            for clause, wanted in {"FMT-LEVEL-05": scaled, of_any: ANY}.items()
        }
        for dtype in ("float16", "bfloat16")
        for family, scaled, of_any in (("latent", "packed", "MLA-06"), ("windowed", ROWS, "WIN-10"))
    },
    ("float16 only", "tiered"): {"TIER-18": "input values larger than float16 can represent"},
    **{  # a paged cache of one dtype has no formats with scales
        (f"{dtype} only", family): dict.fromkeys(clauses, describe_formats(SCALED_FORMATS))
        | dict.fromkeys(given, GIVEN.format(dtype))
        for dtype in ("float16", "bfloat16")
        for family, clauses, given in (
            ("paged", ["PAGED-18"], STATIC_PAGES),
            ("prefix", ["PAGED-18", "PREFIX-16"], STATIC_PAGES),
            ("grouped", ["GROUP-08"], []),
        )
    },
    ("one token at a time", "transfer"): TWO_TOKENS,
    ("one token at a time", "ragged"): TWO_TOKENS
    | {
        f"RAGGED-{number:02}": f"{columns} columns of which some are padding, where its limits say at most 1"
        for number, columns in {1: 5, 2: 4, 3: 4, 4: 6, 5: 3, 7: 3, 8: 5, 9: 4, 10: 4}.items()
    },
    ("one batch row", "ragged"): dict.fromkeys(
        (f"RAGGED-{number:02}" for number in range(1, 11)), "batch_size 2, where its limits leave 1"
    ),
    ("one batch row", "contiguous"): dict.fromkeys(("CONTIG-13", "EDIT-07", "EDIT-08"), "batch_size 2, where its limits say 1"),
    **{("no negative integers", family): {"LAW-11": NEGATIVE} for family in ("blocks", "buffers")},  # counts have no upper bound
    ("no negative integers", "tree"): dict.fromkeys((f"TREE-{n:02}" for n in (*range(1, 9), 10)), NEGATIVE),  # -1 is a parent
    ("no negative integers", "kernels"): {"KERN-02": "negative slots: its integer type has none"},
}
ALSO = {  # families that a limit without a size concerns, or whose size is not a creation argument
    "dtype": [name for name in all_families() if name != "blocks"],
    "head_dim": ["attention"],
    "num_kv_heads": ["attention"],
    "tokens": [family.name for family in all_families().values() if family.appending],
    "sequences": ["paged", "grouped"],
    "negative_integers": list(all_families()),
    "token_hits": ["prefix"],
}
AT_REAL_SIZES = ("one layer", "one sequence at a time")  # LAW-18 takes as long as all other clauses together


def concerned(limit):
    """Return the families that a limit concerns."""
    return [
        family
        for family, record in all_families().items()
        if any(name in record.small or family in ALSO.get(name, ()) for name in LIMITS[limit])
    ]


EACH = [(limit, family) for limit in LIMITS for family in concerned(limit)]
SOME = {*[*EXCEPTIONS][::2], *EACH[::16]}


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("limit", "family"), [pytest.param(*each, marks=() if each in SOME else pytest.mark.long) for each in EACH]
)
def test_every_clause_is_judged_within_limits(limit, family):
    judge, lacking = CheckRunner(Restricted(LIMITS[limit])), {}
    for clause, checks in select_checks(family=family).items():
        written = [check for check in checks if check.run and not check.slow and not check.real]
        if not written or (clause.id == "LAW-18" and limit not in AT_REAL_SIZES):
            continue
        outcomes = judge.judge_clause(written)
        verdict = verdict_of(outcomes)
        assert verdict != "failed", (clause.id, outcomes)
        if verdict != "passed":
            lacking[clause.id] = judge.missing(written, outcomes)
    expected = EXCEPTIONS.get((limit, family), {})
    if family == "prefix" and "token_hits" not in LIMITS[limit]:
        expected = expected | {"PREFIX-19": "hits that end inside a block, where its limits do not say token_hits"}
    assert set(lacking) == set(expected), lacking
    assert all(reason in lacking[clause] for clause, reason in expected.items()), lacking


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("limit", LIMITS)
def test_no_sequence_of_calls_is_a_false_alarm_within_limits(limit):
    judge = CheckRunner(Restricted(LIMITS[limit]), Effort(examples=4))
    for family in concerned(limit):
        if all_families()[family].state_machine:
            assert judge.search(family).findings == {}, family


SIZE = {
    "contiguous": "max_seq_len",
    "paged": "num_blocks",
    "grouped": "num_blocks",
    "quantized": "capacity",
    "tiered": "max_tokens",
    "pooled": "max_tokens",
    "channels": "max_tokens",
    "recurrent": "num_inputs",
}


@pytest.mark.parametrize("most", [1, 4, 7])
@pytest.mark.parametrize("family", SIZE)
def test_a_cache_too_small_for_a_check_is_not_called_wrong(family, most):
    judge, found = CheckRunner(Restricted({SIZE[family]: {"most": most}}, families=[family])), {}
    for clause, checks in select_checks(family=family).items():
        if clause.id != "LAW-18":
            found[clause.id] = [judge.judge_check(check) for check in checks if check.run and not check.slow]
    assert [each for said in found.values() for each in said if isinstance(each, Failure)] == []
    assert all(outcome.missing for outcome in found["LAW-09"])  # a law that appends 11 tokens


PROMISING = """
import kvref
from kvref import errors
from kvref_conformance.implementations.backends import OnBackend

class Fussy(OnBackend):
    limits = {"max_buffers": {"most": 4}}
    def buffers(self, max_buffers):
        raise errors.ConfigError("max_buffers: expected none at all")

IT = Fussy(kvref.reference)
"""


class Promising(Restricted):
    """Declares more than it supports."""

    def __init__(self, takes, promised, families):
        super().__init__(takes, families=families)
        self.limits = promised


@pytest.mark.parametrize(
    ("family", "takes", "promised"),
    [
        ("paged", {"head_dim": [64]}, {"head_dim": [64, 128]}),
        ("paged", {"num_layers": {"least": 2}}, None),
        ("contiguous", {"initial_capacity": {"least": 1}}, None),
        ("contiguous", {"max_seq_len": {"most": 512}}, {"max_seq_len": {"most": 1024}}),
        ("quantized", {"head_dim": {"multiple_of": 16}}, {"head_dim": {"multiple_of": 8, "least": 16}}),
        ("tiered", {"tail_length": {"least": 1}}, {"tail_length": {"most": 64}}),
        ("pooled", {"tokens_per_block": [16]}, {"tokens_per_block": [16, 32]}),
        ("buffers", {"max_buffers": {"least": 2}}, None),
        ("blocks", {"num_blocks": {"least": 1}}, None),
        ("tiered", {"store_format": ["q8"]}, {"store_format": ["q4", "q8"]}),
    ],
)
def test_what_the_limits_promise_is_made_or_law_12_fails(family, takes, promised):
    promising = Promising(takes, promised, [family])
    checks = [check for check in next(iter(select_checks("LAW-12", family).values())) if check.run]
    shown = [outcome for outcome in CheckRunner(promising).judge_clause(checks) if outcome.verdict == "failed"]
    assert [outcome.expected for outcome in shown] == [EXPECTED_OBJECT] * len(shown) != []
    assert all(outcome.got.startswith("ConfigError: ") for outcome in shown)
    assert verdict_of(CheckRunner(Promising(takes, takes, [family])).judge_clause(checks)) == "passed"


def test_what_is_refused_everywhere_is_told_once(kvref, tmp_path):
    (tmp_path / "promising.py").write_text(PROMISING)
    done = kvref("check", "promising:IT", "--family", "buffers", "--clause", "BUF-*,LAW-1*", "--examples", "2", "--no-isolate")
    assert done.returncode == 1
    first = done.stdout.splitlines()[0]
    broken = re.search("breaks (.*);", done.stdout)[1].split(", ")
    assert len(broken) > 5 and f"1 probable cause: {first[:6]} (1 call). {len(broken) - 1} more clauses fail" in done.stdout
    assert done.stdout.count(EXPECTED_OBJECT) == 1


def test_the_nearest_allowed_value():
    def nearest(declared, *wanted):
        return [Limits({"head_dim": declared}).nearest("paged", "head_dim", each) for each in wanted]

    assert nearest([64, 128], 1, 64, 95, 96, 97, 1000) == [64, 64, 64, 128, 128, 128]
    assert nearest(16, 1, 16, 17) == [16, 16, 16]
    assert nearest({"least": 3, "most": 9}, 1, 5, 10) == [3, 5, 9]
    assert nearest({"multiple_of": 16}, 1, 16, 17) == [16, 16, 32]
    assert nearest({"multiple_of": 16, "least": 20, "most": 70}, 1, 40, 65, 1000) == [32, 48, 64, 64]
    assert nearest({"least": 4, "most": None}, 1, 10**9) == [4, 10**9]
    assert Limits().nearest("paged", "head_dim", 5) == 5


def test_as_many_tokens_at_once_as_are_taken():
    def at_most(declared, *wanted):
        return [Limits({"tokens": declared}).limit("paged", "tokens").largest_up_to(each) for each in wanted]

    assert at_most([1, 4], 11, 4, 3, 1, 0) == [4, 4, 1, 1, None]
    assert at_most({"least": 1, "most": 4}, 11, 3, 1, 0) == [4, 3, 1, None]
    assert Limit(least=3, multiple_of=2).largest_up_to(5) == 4
    assert Limit(least=3, multiple_of=2).largest_up_to(3) is None


def test_more_tokens_than_are_taken_at_once_are_handed_in_as_the_fewest_pieces():
    subject = CheckRunner(Restricted({"tokens": [1, 4]}, families=["contiguous"])).begin_family("contiguous")
    cache = new_object(subject, "contiguous")
    keys, values = np.random.default_rng(0).normal(size=(2, cache.config["batch_size"], 2, 11, 5)).astype(np.float32)
    cache.append(keys, values)
    assert [each.request.args["keys"].shape[2] for each in subject.call_trace[1:]] == [4, 4, 1, 1, 1]
    assert np.array_equal(cache.read(), [keys, values])
    with pytest.raises(NotOffered, match="0 tokens, where its limits say 1 or 4"):
        cache.append(keys[:, :, :0], values[:, :, :0])


def test_columns_with_padding_are_not_divided():
    subject = CheckRunner(Restricted({"tokens": [1, 4]}, families=["ragged"])).begin_family("ragged")
    cache = new_object(subject, "ragged")
    keys, values = np.random.default_rng(0).normal(size=(2, cache.batch_size, 2, 5, 5)).astype(np.float32)
    cache.append(keys, values)
    assert np.array_equal(cache.read(1), [keys[1], values[1]])
    with pytest.raises(NotOffered, match="5 columns of which some are padding, where its limits say 1 or 4"):
        cache.append(keys, values, [5] * (cache.batch_size - 1) + [2])


def test_what_holds_others_is_made_large_enough():
    family = all_families()["tiered"]
    sizes = Limits({"tail_length": 32, "warm_length": {"least": 8}}).sizes(family, family.small)
    assert (sizes["tail_length"], sizes["warm_length"], sizes["max_tokens"]) == (32, 8, 40)
    assert "store_format" not in sizes
    sizes = Limits({"tail_length": 32, "max_tokens": [16, 64]}).sizes(family, family.small)
    assert sizes["max_tokens"] == 64


def test_a_family_has_limits_of_its_own_before_those_of_all():
    limits = Limits({"head_dim": 64, "dtype": ["bfloat16", "float16"], "paged": {"head_dim": [128], "dtype": "float32"}})
    assert [limits.nearest(family, "head_dim", 5) for family in ("paged", "quantized")] == [128, 64]
    assert limits.dtypes("paged") == ("float32",)
    assert limits.dtypes("quantized") == ("float16", "bfloat16")
    assert limits.switch("paged", "negative_integers")
    assert not Limits({"paged": {"negative_integers": False}}).switch("paged", "negative_integers")


WRONG = [
    ([64], "limits: expected a mapping of names to limits, got [64]"),
    ({"head_dims": 64}, "limits: head_dims: no such size: did you mean head_dim? (known: "),
    ({"quux": 4}, "limits: quux: no such size (known: "),
    ({"page": {"head_dim": 64}}, "limits: page: no such size: did you mean paged? (known: "),
    ({"paged": {"hed_dim": 64}}, "limits: paged.hed_dim: no such size: did you mean head_dim? (known: "),
    ({"paged": 64}, "limits: paged: expected a mapping of names to limits, got 64"),
    ({"head_dim": []}, "limits: head_dim: expected at least one value, got none"),
    ({"head_dim": "64"}, "limits: head_dim: expected integers of at least 1, got '64'"),
    ({"head_dim": [64, 1.5]}, "limits: head_dim: expected integers of at least 1, got 1.5"),
    ({"head_dim": True}, "limits: head_dim: expected integers of at least 1, got True"),
    ({"head_dim": None}, "limits: head_dim: expected integers of at least 1, got None"),
    ({"head_dim": -64}, "limits: head_dim: expected integers of at least 1, got -64"),
    ({"head_dim": [0, 64]}, "limits: head_dim: expected integers of at least 1, got 0"),
    ({"head_dim": {"most": 0}}, "limits: head_dim: most: expected an integer of at least 1, got 0"),
    ({"head_dim": {"least": 9, "most": 5}}, "limits: head_dim: least 9 is above most 5"),
    ({"head_dim": {"least": 17, "most": 31, "multiple_of": 16}}, "limits: head_dim: no multiple of 16 from 17 to 31"),
    ({"width": {"most": 8, "multiple_of": 16}}, "limits: width: no multiple of 16 from 0 to 8"),
    (
        {"max_tokens": {"most": 10}, "tail_length": {"least": 64}},
        "limits: max_tokens: at most 10, but tiered needs at least 64 for tail_length and warm_length",
    ),
    ({"head_dim": {"multiple_of": 0}}, "limits: head_dim: multiple_of: expected an integer of at least 1, got 0"),
    ({"head_dim": {"least": "1"}}, "limits: head_dim: least: expected an integer of at least 0, got '1'"),
    ({"head_dim": {"min": 1}}, "limits: head_dim: expected some of least, most, multiple_of, got 'min'"),
    ({"dtype": "float64"}, "limits: dtype: expected some of float32, float16, bfloat16"),
    ({"dtype": {"least": 1}}, "limits: dtype: expected some of float32, float16, bfloat16"),
    ({"negative_integers": 0}, "limits: negative_integers: expected true or false, got 0"),
    ({"tokens": {"least": 2}}, 'limits: tokens: expected a limit that allows 1, such as {"most": 8}, got at least 2'),
    ({"sequences": [2, 4]}, 'limits: sequences: expected a limit that allows 1, such as {"most": 8}, got 2 or 4'),
]


@pytest.mark.parametrize(("declared", "message"), WRONG)
def test_limits_that_say_nothing_or_contradict_themselves(declared, message):
    with pytest.raises(LimitsError) as error:
        Limits(declared)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", [{"dtype": ["float16"]}, {"paged": {"dtype": ["float16", "bfloat16"]}}])
def test_a_dtype_that_is_none_of_the_formats_is_refused(dtype):
    with pytest.raises(CannotRun, match=r"^mine: limits: dtype: expected one of its formats \(int8, float32\), got float16"):
        validate_implementation("mine", Restricted(dtype, formats=["int8", "float32"]))
    assert validate_implementation("mine", Restricted(dtype, formats=["float32", "float16"]))
    # formats have codes only: arrays are passed in the declared dtype
    assert validate_implementation("mine", Restricted(dtype, formats=["int8"]))


@pytest.mark.parametrize("error", [RuntimeError("no device"), AttributeError("no device")])
def test_limits_that_cannot_be_asked_for_are_not_none(error):
    class Raises(Restricted):
        @property
        def limits(self):
            raise error

        @limits.setter
        def limits(self, _):
            pass

    with pytest.raises(CannotRun, match=f"^mine: limits: {type(error).__name__}: no device$"):
        validate_implementation("mine", Raises())


def test_they_cost_one_line_before_anything_runs(kvref, tmp_path):
    declared, message = WRONG[1]
    (tmp_path / "wrong.py").write_text(f"{PROMISING}\nIT.limits = {declared!r}\n")
    (tmp_path / "kvref.toml").write_text('[implementations.pool]\nexec = ["true"]\nlimits = {head_dim = {least = 9, most = 5}}\n')
    done = kvref("check", "pool")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.endswith("kvref.toml: [implementations.pool]: limits: head_dim: least 9 is above most 5\n")
    (tmp_path / "kvref.toml").unlink()
    done = kvref("check", "wrong:IT")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"kvref: wrong:IT: {message}")
