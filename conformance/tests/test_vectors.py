"""The static vectors: they match the reference, other correct caches pass them, and planted bugs do not."""

import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import numpy as np
import pytest
from commandline import run_kvref
from safetensors.numpy import load_file

import kvref as kvref_library
from kvref_conformance.implementations import load_implementation
from kvref_conformance.implementations.backends import OnBackend
from kvref_conformance.oracle.expectations import ExpectedArrays, exact_reads
from kvref_conformance.runner.check_runner import CheckRunner
from kvref_conformance.runner.options import Effort
from kvref_conformance.traces import format
from kvref_conformance.traces.json_codec import to_wire
from kvref_conformance.vectors.check import check_vectors
from kvref_conformance.vectors.generate import make_vectors
from kvref_conformance.vectors.replay import parse_expectation

VECTORS = Path(__file__).parents[1] / "vectors"
MANIFEST = json.loads((VECTORS / "manifest.json").read_text())


def held(name, folder=VECTORS):
    judge = CheckRunner(load_implementation(name), Effort())
    found = list(check_vectors(folder, judge))
    judge.close()
    return found


@pytest.mark.long
def test_writing_them_again_changes_nothing(tmp_path):
    if MANIFEST["hypothesis"] != hypothesis.__version__:
        pytest.skip(f"the machines' samples were drawn by Hypothesis {MANIFEST['hypothesis']}, which constraints.txt pins")
    make_vectors().write(tmp_path)
    old = {path.relative_to(VECTORS): path.read_bytes() for path in VECTORS.rglob("*") if path.is_file()}
    new = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert sorted(map(str, old)) == sorted(map(str, new))
    assert [str(name) for name in old if old[name] != new[name]] == [], "kvref vectors -o conformance/vectors writes them"
    assert sum(map(len, new.values())) < 17_500_000


@pytest.mark.parametrize("name", ["numpy", "numpy:token-hits", pytest.param("torch", marks=pytest.mark.torch)])
def test_they_hold_for_other_backends(name):
    other = {
        each["file"]
        for each in MANIFEST["traces"]
        if each["family"] == "prefix" and ("token_hits" in each.get("choices", ())) != name.endswith(":token-hits")
    }
    for each in held(name):
        assert each.verdict == ("not offered" if each.file in other else "passed"), each.file


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("member", "clause"),
    [
        ("contiguous-rejects-the-last-token", "CONTIG-06"), ("blocks-freed-twice", "BLOCK-05"),
        ("paged-reads-past-the-length", "LAW-05"), ("quantized-again-at-each-append", "QUANT-05"),
        ("tiered-evicts-one-a-call", "TIER-05"), ("buffers-released-twice", "BUF-05"),
        ("pooled-clear-keeps-its-buffers", "POOL-05"), ("fp8-rounds-twice", "FMT-FP8-02"),
        ("attention-one-kv-head", "ATTN-04"), ("kernels-write-padding", "KERN-01"), ("int8-reciprocal", "FMT-INT8-02"),
        ("recurrent-accepted-drafts-are-lost", "RECUR-09"),
    ],
)  # fmt: skip
def test_a_bug_does_not_get_past_them(member, clause):
    failed = [each for each in held(f"zoo:{member}") if each.verdict == "failed"]
    assert clause in {each.violation.clause for each in failed} | {Path(each.file).name[: len(clause)] for each in failed}
    for each in failed:
        if each.line:
            reply = json.loads((VECTORS / each.file).read_text().splitlines()[each.line - 1])
            assert reply["clause"] == each.violation.clause or "ok" in reply


@pytest.mark.parametrize("some", ["machines/*-0.jsonl", "checks/*-01-*.jsonl"])
def test_what_is_read_is_what_was_written(some):
    for path in VECTORS.glob(some):
        for reply in format.read_trace(path).replies:
            expected = parse_expectation(reply)
            must = {name: to_wire(value) for name, value in expected.to_json().items()} | {"clause": expected.clause}
            came = ("ok", "id") if "chosen" in reply or "any" in reply else ("id",)
            if "handle" not in (reply.get("ok") if isinstance(reply.get("ok"), dict) else ()):
                assert must == {name: value for name, value in reply.items() if name not in came}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("member", "format"), [("int8-reciprocal", "int8"), ("fp8-rounds-twice", "float8_e4m3fn")])
def test_a_bug_of_a_format_does_not_get_past_its_tensors(member, format):
    assert f"formats/{format}.safetensors" in {each.file for each in held(f"zoo:{member}") if each.verdict == "failed"}


def test_a_zero_that_lost_its_sign_does_not_get_past_them():
    right = OnBackend(kvref_library.reference)
    casts = right.elements()
    unsigned = SimpleNamespace(encode=casts.encode, decode=lambda codes, format: casts.decode(codes, format) + np.float32(0))

    class Unsigned:
        name, version, language, level, formats = "unsigned", "0", "python", "exact", right.formats
        asarray, to_numpy, elements = right.asarray, right.to_numpy, lambda self: unsigned

    failed = {each.file: each.violation for each in check_vectors(VECTORS, CheckRunner(Unsigned())) if each.violation}
    lost = failed["formats/float8_e5m2.safetensors"]
    assert (lost.expected, lost.got) == ("-0.0", "0.0")


def test_the_manifest_says_what_there_is():
    listed = [entry["file"] for entry in MANIFEST["traces"] + MANIFEST["formats"]]
    assert sorted(listed) == sorted(
        str(path.relative_to(VECTORS)) for path in VECTORS.rglob("*.*") if path.name != "manifest.json"
    )
    for entry in MANIFEST["traces"]:
        header = json.loads((VECTORS / entry["file"]).read_text().partition("\n")[0])
        assert (header["clause"], header["check"], header["judge"]) == (entry["clause"], entry["check"], "model")
    assert {entry["clause"] for entry in MANIFEST["traces"]} > {"PAGED-07", "QUANT-05", "TIER-05", "FMT-INT8-01", "any"}
    assert all(entry["why"] for entry in MANIFEST["left_out"])
    smaller = {entry["clause"] for entry in MANIFEST["left_out"] if "its clause has a smaller trace" in entry["why"]}
    assert smaller and smaller <= {entry["clause"] for entry in MANIFEST["traces"]}


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_the_formats_are_what_ml_dtypes_says(name):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    tensors, dtype = load_file(VECTORS / f"formats/{name}.safetensors"), getattr(ml_dtypes, name)
    decoded = tensors["decode.codes"].view(dtype).astype(np.float32)
    np.testing.assert_array_equal(tensors["decode.values"], decoded)
    values = tensors["encode.values"]
    inside = np.abs(values) <= np.nanmax(decoded[np.isfinite(decoded)])
    np.testing.assert_array_equal(tensors["encode.codes"][inside], values[inside].astype(dtype).view(np.uint8))
    stored = tensors["rows_64.codes"].view(dtype).astype(np.float32) * tensors["rows_64.scale"][:, None]
    np.testing.assert_array_equal(tensors["rows_64.values"], stored)


@pytest.fixture
def kvref(tmp_path):
    def run(*arguments):
        done = run_kvref("vectors", *arguments, folder=tmp_path)
        assert "Traceback" not in done.stderr
        return done

    return run


@pytest.fixture
def small(tmp_path):
    """A set with only the block pool's traces."""
    folder = tmp_path / "small"
    (folder / "checks").mkdir(parents=True)
    traces = [entry for entry in MANIFEST["traces"] if entry["file"].startswith("checks/BLOCK")]
    for entry in traces:
        shutil.copy(VECTORS / entry["file"], folder / entry["file"])
    (folder / "manifest.json").write_text(json.dumps(MANIFEST | {"traces": traces, "formats": []}))
    return folder


def test_the_command_shows_where_they_part(kvref, small):
    done = kvref("--check", str(small), "zoo:blocks-freed-twice")
    assert (done.returncode, done.stderr) == (1, "")
    assert "BLOCK-05 · A block cannot be freed twice   (zoo:blocks-freed-twice)" in done.stdout
    assert re.search(r"first mismatch at line \d+ of \S+/checks/BLOCK-05-free-twice-raises-blocks.jsonl", done.stdout)
    assert "expected BlockNotAllocated to be raised\n    got      no error" in done.stdout
    done = kvref("--check", str(small), "numpy")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "every reply matches the vectors")


def test_a_conversation_goes_on_without_what_only_looks_and_stops_without_the_rest(small):
    program = f"exec:{sys.executable} {Path(__file__).parent / 'misbehaving_program.py'}"
    several = {str(path.relative_to(small)) for path in small.rglob("*.jsonl") if "blocks.allocate_many" in path.read_text()}
    for way in ("", " declines"):  # the program allocates one block per call; some vectors allocate several
        verdicts = {each.file: each.verdict for each in held(program + way, small)}
        assert {file for file, verdict in verdicts.items() if verdict == "not offered"} == several  # they are rejected as a whole
        assert set(verdicts.values()) == {"passed", "not offered"}
    verdicts = {each.file: each.verdict for each in held(f"{program} declines-more", small)}
    assert verdicts["checks/BLOCK-02-allocate-returns-each-block-once-blocks.jsonl"] == "not offered"
    assert set(verdicts.values()) == {"passed", "not offered"}


def test_what_is_wrong_with_a_set_costs_one_line(kvref, small, tmp_path):
    def refused(*arguments):
        done = kvref(*arguments)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        return done.stderr

    assert "contains no manifest.json" in refused("--check", str(tmp_path), "numpy")
    assert "no implementation 'nmpy': did you mean 'numpy'?" in refused("--check", str(small), "nmpy")
    assert "expected also a NAME or --exec COMMAND" in refused("--check", str(small))
    assert "expected -o DIR" in refused("numpy")
    assert "the vectors are always made from the reference" in refused("-o", "new", "numpy")
    assert "is not empty and has no manifest.json" in refused("-o", str(tmp_path))
    trace = next((small / "checks").iterdir())
    trace.write_text(trace.read_text() + "\n")
    assert "it was changed after the set was written" in refused("--check", str(small), "numpy")
    trace.unlink()
    assert "listed in the manifest, but missing" in refused("--check", str(small), "numpy")
    (small / "manifest.json").write_text('{"vectors": 2}')
    assert "expected a set of version 1, got 2" in refused("--check", str(small), "numpy")
    for broken in ({"vectors": 1}, MANIFEST | {"traces": [{"file": "checks/x.jsonl"}]}, MANIFEST | {"formats": 5}):
        (small / "manifest.json").write_text(json.dumps(broken))
        assert "expected a list of objects with " in refused("--check", str(small), "numpy")
    (small / "manifest.json").write_text("{")
    assert "not JSON" in refused("--check", str(small), "numpy")


def test_who_offers_nothing_they_are_about_is_told_so(kvref, small):
    done = kvref("--check", str(small), "zoo:int8-truncates")
    assert (done.returncode, done.stderr) == (
        2,
        "kvref: zoo:int8-truncates: nothing to test, it offers no operation of these vectors\n",
    )


def test_a_bound_is_said_where_it_is_zero_too():
    """Attention without tokens is zero, of either sign: without a bound a vector would require the exact bits."""
    nothing = ExpectedArrays("ATTN-08", parts=(exact_reads(np.zeros(2, np.float32)),), always_slack=True)
    assert nothing.to_json()["within"].tolist() == [0.0, 0.0]
