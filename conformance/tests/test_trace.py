"""Traces: written ones are valid and can be read again, invalid ones are rejected with the line, and failures replay."""

import json
import re
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import kvref
import kvref_zoo
from kvref_conformance.calls.messages import CallReply, CallRequest, Exchange, ObjectReference, ReplyReference, format_calls
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.families import all_families, names
from kvref_conformance.implementations import load_implementation
from kvref_conformance.json_schema import read_schema
from kvref_conformance.runner.check_runner import CheckRunner, select_checks
from kvref_conformance.runner.options import Effort
from kvref_conformance.runner.replay import replay_saved_trace
from kvref_conformance.testlib.registry import all_checks
from kvref_conformance.traces import format
from kvref_conformance.traces.json_codec import NotSerializable, from_wire, to_wire
from kvref_conformance.traces.paths import check_path_name, implementation_path_name, save_all_traces, save_failure

CHAPTER = Path(kvref.__file__).parent / "spec" / "trace.md"
DTYPES = [np.dtype(name) for name in ("float32", "float64", "float16", "bool", "int8", "int64", "uint8", "uint16", "uint64")]
ARRAYS = st.sampled_from(DTYPES).flatmap(lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0, max_dims=3)))


def valid(line):
    jsonschema.Draft202012Validator(read_schema(*format.SCHEMA)).validate(json.loads(line))


@given(ARRAYS)
def test_an_array_comes_back_bit_for_bit(array):
    wire = json.loads(json.dumps(to_wire(array)))
    back = from_wire(wire)
    assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())


def test_bfloat16_and_byte_order_and_strides_come_back():
    import ml_dtypes

    for array in (
        np.arange(6, dtype=np.float32).astype(ml_dtypes.bfloat16),
        np.arange(6, dtype=">f4"),
        np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2],
    ):
        assert np.array_equal(from_wire(to_wire(array)).astype(np.float32), array.astype(np.float32))


def test_an_integer_of_a_type_comes_back_as_one():
    for number in (np.int8(-3), np.uint64(2**64 - 1)):
        wire = json.loads(json.dumps(to_wire(number)))
        back = from_wire(wire)
        assert (type(back), back) == (type(number), number)


def test_a_failure_that_takes_an_integer_of_a_type_replays(tmp_path):
    """LAW-20: the file keeps the integer's type, the model uses its value, and the call is shown with both."""
    name = "zoo:contiguous-keeps-the-callers-integer"
    judge = CheckRunner(load_implementation(name), Effort(examples=5), name)
    ((_, checks),) = select_checks("LAW-20", "contiguous").items()
    (failed,) = (outcome for outcome in judge.judge_clause(checks) if outcome.trace)
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(failed.trace), encoding="utf-8")
    replay = replay_saved_trace(format.read_trace(path), CheckRunner(load_implementation(name), Effort(), name))
    assert replay.calls[1:] == [
        "contiguous.advance(int8(100))",
        "contiguous.advance(int8(100))",
        "contiguous.seq_len  returned -56",
    ]
    assert (replay.expected, replay.got) == ("200", "-56")
    assert (
        replay_saved_trace(
            format.read_trace(path), CheckRunner(load_implementation("reference"), Effort(), "reference")
        ).mismatch_line
        is None
    )


def test_other_values_come_back():
    for value in (
        None,
        3,
        -1,
        2.5,
        "words",
        [1, [2]],
        ObjectReference(4),
        ReplyReference(7),
        float("inf"),
        float("-inf"),
        {"hits": 1},
    ):
        assert from_wire(json.loads(json.dumps(to_wire(value)))) == value
    assert np.isnan(from_wire(to_wire(float("nan"))))
    assert to_wire((1, 2)) == [1, 2]
    assert to_wire(object).startswith("<class")


@pytest.mark.parametrize(
    "wire",
    [
        {"dtype": "float7", "shape": [1], "base64": "AAAA"},
        {"dtype": "float32", "shape": [2], "base64": "AAAAAA=="},
        {"dtype": "float32", "shape": [1], "base64": "no base64"},
        {"dtype": "float32", "base64": "AAAAAA=="},
        {"dtype": "float32", "shape": ["x"], "base64": "AAAAAA=="},
    ],
)
def test_a_malformed_array_is_refused(wire):
    with pytest.raises(NotSerializable, match="array: "):
        from_wire(wire)


def test_the_chapters_example_is_a_trace(tmp_path):
    (example,) = re.findall(r"```text\n(.*?)```", CHAPTER.read_text(encoding="utf-8"), flags=re.DOTALL)
    for line in example.splitlines():
        valid(line)
    path = tmp_path / "example.jsonl"
    path.write_text(example)
    trace = format.read_trace(path)
    assert [request.op for request in trace.requests] == ["blocks.new", "blocks.free"]
    assert replay_saved_trace(trace, CheckRunner(load_implementation("reference"))).mismatch_line is None
    replay = replay_saved_trace(trace, CheckRunner(load_implementation("zoo:blocks-free-ignores-free-blocks")))
    assert (replay.mismatch_line, replay.got) == (5, "no error")


HEADER = (
    '{"trace": 1, "spec": "0", "clause": "BLOCK-05", "check": "x", "judge": "model", '
    '"implementation": {"name": "n", "version": "1", "language": "python", "level": "exact"}}'
)
NEW = '{"id": 1, "op": "blocks.new", "args": {"num_blocks": 1}}'


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "1: expected a header"),
        (["nonsense"], "1: not JSON: "),
        (["[1]"], "1: "),
        ([NEW], "1: expected a header"),
        ([HEADER.replace('"trace": 1', '"trace": 2')], "1: a trace of version 2; this kvref reads version 1"),
        ([HEADER.replace('"judge": "model"', '"judge": "me"')], "1: "),
        ([HEADER, '{"id": 1, "ok": null}'], "2: expected a request, with an op, got the fields id, ok"),
        ([HEADER, NEW.replace("blocks.new", "blocks.melt")], "2: no operation 'blocks.melt'"),
        ([HEADER, NEW.replace("blocks.new", "rocks.new")], "2: no operation 'rocks.new'"),
        ([HEADER, NEW], "3: expected the reply to request 1, got "),
        ([HEADER, NEW, '{"id": 2, "ok": null}'], "3: expected the reply to request 1, got "),
        ([HEADER, NEW.replace('"args"', '"on": 9, "args"'), '{"id": 1, "ok": null}'], "2: no earlier request has the id 9"),
        ([HEADER, NEW.replace("1}", '{"dtype": "float9", "shape": [], "base64": ""}}'), ""], "2: "),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(tmp_path, lines, message):
    path = tmp_path / "bad.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))
    with pytest.raises(format.TraceError) as refused:
        format.read_trace(path)
    assert str(refused.value).startswith(f"{path}:{message}")
    assert "\n" not in str(refused.value)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(format.TraceError, match="not a text file"):
        format.read_trace(path)


def test_calls_are_shown_as_python():
    exchanges = [
        Exchange(CallRequest(1, "paged.new", None, {"num_blocks": 2}), CallReply(ObjectReference(1))),
        Exchange(CallRequest(2, "paged.create", 1, {}), CallReply(0)),
        Exchange(CallRequest(3, "paged.length", 1, {"sequence": ReplyReference(2), "layer": 0}), CallReply(0), quiet=True),
        Exchange(
            CallRequest(4, "paged.write", 1, {"sequence": ReplyReference(2), "layer": 0, "start": 0, "keys": np.zeros((9, 9))}),
            CallReply(),
        ),
        Exchange(CallRequest(5, "paged.num_free_blocks", 1, {}), CallReply(1)),
        Exchange(CallRequest(6, "paged.drop", 1, {"sequence": 7})),
    ]
    assert format_calls(exchanges) == [
        "paged = paged(num_blocks=2)",
        "sequence = paged.create()  returned 0",
        "paged.write(sequence, 0, 0, float64[9, 9])",
        "paged.num_free_blocks  returned 1",
        "paged.drop(7)  did not return",
    ]


def failure(name, clause, examples=60):
    judge = CheckRunner(load_implementation(name), Effort(examples=examples))
    ((found, checks),) = select_checks(clause).items()
    return judge, [outcome for outcome in judge.judge_clause(checks) if outcome.verdict == "failed"], found


SHRUNK = {
    "contiguous": ("zoo:contiguous-advances-past-its-memory", "CONTIG-10"),
    "blocks": ("zoo:blocks-freed-twice", "BLOCK-05"),
    "paged": ("zoo:paged-leaks-a-block", "PAGED-07"),
    "prefix": ("zoo:prefix-finds-every-token", "PREFIX-01"),
    "quantized": ("zoo:quantized-clear-keeps-a-layer", "QUANT-08"),
    "tiered": ("zoo:tiered-evicts-one-a-call", "TIER-05"),
    "buffers": ("zoo:buffers-released-twice", "BUF-05"),
    "pooled": ("zoo:pooled-clear-keeps-its-buffers", "POOL-05"),
    "elements": ("zoo:fp8-rounds-twice", "FMT-FP8-02"),
    "rows": ("zoo:int8-truncates", "FMT-INT8-02"),
    "kernels": ("zoo:kernels-write-padding", "KERN-02"),
    "attention": ("zoo:attention-one-kv-head", "ATTN-01"),
    "engine": ("zoo:engine-rolls-back-the-length-only", "ENG-09"),
    "windowed": ("zoo:windowed-one-too-long", "WIN-01"),
    "grouped": ("zoo:grouped-tables-keep-freed-blocks", "GROUP-02"),
    "channels": ("zoo:channels-scale-keys-by-token", "KIVI-01"),
    "latent": ("zoo:latent-value-is-the-end-of-the-row", "MLA-01"),
    "sharded": ("zoo:sharded-append-half-written", "SHARD-04"),
    "sparse": ("zoo:sparse-copies-blocks-without-index-keys", "SPARSE-05"),
    "pruned": ("zoo:pruned-by-the-first-head", "PRUNED-03"),
    "cross": ("zoo:cross-sources-are-not-reordered", "CROSS-06"),
    "compressed": ("zoo:compressed-state-is-not-saved", "COMPR-07"),
    "ragged": ("zoo:ragged-padding-is-not-filtered", "RAGGED-06"),
    "tree": ("zoo:tree-accepts-the-first-rows", "TREE-07"),
    "transfer": ("zoo:transfer-abort-frees-blocks", "TRANSFER-07"),
    "recurrent": ("zoo:recurrent-accepted-drafts-are-lost", "RECUR-09"),
    "hosted": ("zoo:hosted-scales-are-not-copied", "MOVE-12"),
    "offload": ("zoo:offload-found-before-complete", "MOVE-06"),
}


# The other state machines take long: nox -s extended.
QUICK = ("contiguous", "blocks", "paged", "buffers", "pooled", "elements", "rows", "kernels", "attention")
LONGER = [pytest.param(family, marks=pytest.mark.extended) for family in names() if family not in QUICK]


@pytest.mark.parametrize("family", [*QUICK, *LONGER])
def test_a_bug_in_each_family_shrinks_to_six_calls_and_replays(family, tmp_path):
    name, clause = SHRUNK[family]
    judge, failed, _ = failure(name, clause)
    shortest, path = save_failure(failed, tmp_path, clause, name)
    trace = format.read_trace(path)
    for line in path.read_text().splitlines():
        valid(line)
    assert len(trace.requests) <= 6, shortest.calls
    said = {"what": shortest.what, "expected": shortest.expected, "got": shortest.got}
    assert trace.header.failed == said | ({"cause": shortest.cause} if family == "engine" else {})
    replay = replay_saved_trace(trace, judge)
    assert replay.mismatch_line == trace.lines[-1]
    assert (replay.what, replay.expected, replay.got) == (shortest.what, shortest.expected, shortest.got)
    right = replay_saved_trace(trace, CheckRunner(load_implementation("reference")))
    assert right.mismatch_line is None


def test_the_same_seed_finds_the_same():
    runs = [failure("zoo:paged-leaks-a-block", "PAGED-07", 30)[1] for _ in range(2)]
    assert [outcome.trace for outcome in runs[0]] == [outcome.trace for outcome in runs[1]]


def test_what_the_model_cannot_see_is_left_to_the_check(tmp_path):
    judge, failed, _ = failure("zoo:contiguous-keeps-the-callers-array", "LAW-08")
    _, path = save_failure(failed, tmp_path, "LAW-08", "one/../cache")
    assert path.parent == tmp_path
    for line in path.read_text().splitlines():
        valid(line)
    trace = format.read_trace(path)
    assert trace.header.judge == "check"  # every reply was right: the array changed afterwards
    replay = replay_saved_trace(trace, judge)
    assert (replay.mismatch_line, replay.got) == (trace.lines[-1], trace.header.failed["got"])
    assert not replay_saved_trace(trace, CheckRunner(load_implementation("reference"))).mismatch_line
    with pytest.raises(NotOffered, match="family contiguous"):
        replay_saved_trace(trace, CheckRunner(load_implementation("zoo:blocks-freed-twice")))


def test_a_trace_of_what_is_not_offered_cannot_be_replayed(tmp_path):
    _, failed, _ = failure("zoo:blocks-freed-twice", "BLOCK-05")
    _, path = save_failure(failed, tmp_path, "BLOCK-05", "x")
    with pytest.raises(NotOffered, match="family blocks"):
        replay_saved_trace(format.read_trace(path), CheckRunner(load_implementation("kvref_adapters.ml_dtypes.adapter:MlDtypes")))


def test_what_passes_can_be_kept_and_holds_for_others(tmp_path):
    judge = CheckRunner(load_implementation("reference"), Effort(keep_traces=True, examples=5))
    for clause in ("CONTIG-04", "TIER-05", "BUF-03", "QUANT-02", "POOL-03", "KERN-01"):
        ((found, checks),) = select_checks(clause).items()
        save_all_traces(judge.judge_clause(checks), tmp_path, found.id, "reference")
    paths = sorted(tmp_path.rglob("*.jsonl"))
    assert len(paths) >= 9
    other = CheckRunner(load_implementation("numpy"))
    for path in paths:
        for line in path.read_text().splitlines():
            valid(line)
        assert not replay_saved_trace(format.read_trace(path), other).mismatch_line, path.name


def test_a_failure_that_is_gone_leaves_no_file(tmp_path):
    _, failed, _ = failure("zoo:blocks-freed-twice", "BLOCK-05")
    _, path = save_failure(failed, tmp_path, "BLOCK-05", "x")
    assert path.exists()
    assert save_failure([], tmp_path, "BLOCK-05", "x") is None
    assert not path.exists()


def test_two_implementations_never_share_a_file(tmp_path):
    names = [
        "a b", "a-b", "a:b", "a/b", "a_b", "a.b", "a+b", "a=b", "a  b", " a-b", "a-b ", "a\\b", "a%20b", "a=20b", "a\nb", "a\0b",
        "../../etc/passwd", "..", ".", "", "=", "<script>", "zoo:x", "zoo+x", "exec:./harness --flag", "exec:./harness -flag",
        "x" * 119, "x" * 120, "x" * 121, "x" * 122, "x" * 121 + "y", "ä-b", "é" * 400, "é" * 401, "\udc80",
    ]  # fmt: skip
    parts = [implementation_path_name(name) for name in names]
    assert len(set(parts)) == len(names)
    for part in parts:
        assert re.fullmatch(r"[A-Za-z0-9_=+-][A-Za-z0-9_.=+-]{0,120}", part)
    assert [implementation_path_name(name) for name in ("numpy", "mypackage.kvref:MyCache", "./a b")] == [
        "numpy", "mypackage.kvref+MyCache", "=2E=2Fa=20b"
    ]  # fmt: skip
    _, failed, _ = failure("zoo:blocks-freed-twice", "BLOCK-05")
    paths = [save_failure(failed, tmp_path, clause, name)[1] for name in names for clause in ("BLOCK-05", "FMT-CAST-05")]
    assert len(list(tmp_path.iterdir())) == len(set(paths)) == 2 * len(names)
    assert save_failure([], tmp_path, "BLOCK-05", "a:b") is None  # a failure that no longer occurs removes its trace
    assert len(list(tmp_path.iterdir())) == 2 * len(names) - 1


def test_checks_have_files_of_their_own():
    names = [(check.clause, check_path_name(check.name)) for check in all_checks()]
    assert len(set(names)) == len(names)


def test_a_machine_speaks_only_for_clauses_its_family_is_checked_by():
    written_out = {(check.clause, check.family) for check in all_checks() if check.run}
    for family, clauses in ((each.name, each.speaks_for) for each in all_families().values() if each.state_machine):
        for clause in clauses:
            # No hand-written check covers the errors of `hosted`: its state machine alone makes calls with invalid arguments.
            assert (clause, family) in written_out or family == "hosted", f"{clause} has no check of {family}"


def test_the_zoo_offers_one_for_each_family():
    assert {name.removeprefix("zoo:") for name, _ in SHRUNK.values()} <= set(kvref_zoo.names())
