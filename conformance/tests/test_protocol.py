"""The protocol's chapter, its schema and the interface are consistent; the self-test of a harness reports its errors."""

import json
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import jsonschema
import pytest

from kvref_conformance import generate_protocol
from kvref_conformance.calls.messages import KNOWN_KINDS
from kvref_conformance.calls.operation_table import factory_operation, operations
from kvref_conformance.families import all_families, names
from kvref_conformance.runner.harness_selftest import run_selftest
from kvref_conformance.testlib.sample_calls import Sizes, operation_of

HERE = Path(__file__).parent
VECTORS = HERE.parent / "vectors"
WRITE = "python -m kvref_conformance.generate_protocol writes it"


def test_the_chapter_and_the_schema_are_the_interfaces():
    chapter = (generate_protocol.SPEC / "protocol.md").read_text()
    assert chapter == generate_protocol.updated_chapter(chapter), WRITE
    assert (
        json.loads((generate_protocol.SPEC / "protocol.schema.json").read_text()) == generate_protocol.json_schema_document()
    ), WRITE
    for op, _ in generate_protocol.all_operations():
        assert f"| `{op}` |" in chapter


def test_the_chapter_lists_every_format_and_limit_of_hello():
    chapter = (generate_protocol.SPEC / "protocol.md").read_text()
    hello = json.loads((generate_protocol.SPEC / "protocol.schema.json").read_text())["$defs"]["result:hello"]["properties"]
    pattern = re.search(r"`({\S+})` in all combinations", chapter)[1]
    parts = [re.findall(r"[^{},]+", part) for part in re.split(r"({[^}]*})", pattern) if part]
    of_groups = {"".join(each) for each in product(*parts)}
    formats, limits = set(hello["formats"]["items"]["enum"]), set(hello["limits"]["propertyNames"]["enum"])
    assert of_groups < formats
    assert all(f"`{name}`" in generate_protocol.formats_text() for name in formats - of_groups)
    assert all(f"`{name}`" in generate_protocol.limits_text() for name in limits - set(names()))
    with pytest.raises(ValueError, match="limits: written by"):
        generate_protocol.updated_chapter(chapter.replace("limits: written by", "limits, written by"))


def test_every_error_that_is_asked_for_is_in_the_chapter():
    known = dict(generate_protocol.all_operations())
    for family in all_families().values():
        for name in family.interface.ERRORS:
            assert (name if name in known else f"{family.name}.{name}") in known
    assert {kind for op in known for kind in generate_protocol.error_kinds(op)} <= KNOWN_KINDS
    seen = set()
    for path in VECTORS.glob("*/*.jsonl"):
        _, *lines = map(json.loads, path.read_text().splitlines())
        for request, reply in zip(lines[::2], lines[1::2], strict=True):
            for kind in reply.get("error", {}).get("kinds", ()):
                assert kind in generate_protocol.error_kinds(request["op"]), (path.name, request["op"], kind)
                seen.add((request["op"], kind))
    assert len(seen) > 80  # of about 110 listed ones


def test_what_goes_over_the_pipe_is_as_the_schema_says():
    schema = json.loads((generate_protocol.SPEC / "protocol.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)

    def valid(part):
        return jsonschema.Draft202012Validator({"$ref": f"#/$defs/{part}", "$defs": schema["$defs"]})

    def sent(request, replies):
        """Replace references to earlier replies, which only trace files contain, by these replies."""
        return json.loads(re.sub(r'{"reply": (\d+)}', lambda found: json.dumps(replies[int(found[1])]), json.dumps(request)))

    parts = {op: (valid(f"request:{op}"), valid(f"result:{op}")) for op, _ in generate_protocol.all_operations()}
    seen = set()
    for path in [*VECTORS.glob("machines/*-[01].jsonl"), *VECTORS.glob("checks/[AKF]*-0[1-7]-*.jsonl")]:
        _, *lines = map(json.loads, path.read_text().splitlines())
        replies = {reply["id"]: reply.get("ok") for reply in lines[1::2]}
        for request, reply in zip(lines[::2], lines[1::2], strict=True):
            if "ok" in reply:  # not if it is an error
                op = request["op"]
                seen.add(op)
                assert not list(parts[op][0].iter_errors(sent(request, replies))), (path.name, request)
                if not (isinstance(reply["ok"], list) and op in ("paged.lengths", "rows.quantize")):
                    assert not list(parts[op][1].iter_errors(reply["ok"])), (path.name, reply)
    assert len(seen) > 50
    wrong = {"id": 3, "op": "blocks.free", "on": 1, "args": {"block": "two"}}
    assert list(parts["blocks.free"][0].iter_errors(wrong))
    assert list(parts["blocks.free"][0].iter_errors(wrong | {"args": {"block": 2, "twice": True}}))


@pytest.mark.parametrize("family", names())
def test_the_selftest_asks_for_every_operation_with_all_its_arguments(family):
    asked = all_families()[family].interface.sample_calls(Sizes(2, 5, 2, "int8"))
    owners = ("buffers", "buffer") if family == "buffers" else (family,)
    assert set(map(operation_of, asked)) == {f"{owner}.{name}" for owner in owners for name in operations(owner)}
    gave = [f"{name}.{op}" for name, record in all_families().items() for op in record.gives] + ["transfer.begin again"]
    got = dict.fromkeys(gave, 0) | {"rows.quantize": (0, 0, None)}
    for op, arguments in asked.items():
        owner, _, name = operation_of(op).partition(".")
        operation = operations(owner)[name]
        expected = {"tail_length"} if op == "tiered.update_policy" else set(operation.arguments) - set(operation.optional)
        assert set(arguments(got)) == expected
    assert factory_operation(family).result is all_families()[family].protocol


def test_a_program_that_works_is_told_so():
    program = f"{sys.executable} {HERE / 'misbehaving_program.py'}"
    command = [sys.executable, "-m", "kvref_conformance.cli", "harness", "--selftest", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "  ✓ hello: pool 1 (python, exact), blocks\n" in done.stdout
    assert "  ✓ blocks.new with num_blocks -1: error ConfigError\n" in done.stdout
    assert "the protocol works: " in done.stdout


WAYS = [
    ("garbage", "blocks.free", "expected a line of JSON, got 'Segmentation fault (not really)'"),
    ("half-a-line", "blocks.free", "expected a reply within 1 s, got an incomplete line: "),
    ("wrong-id", "blocks.free", 'expected "id": '),
    ("both", "blocks.free", 'expected either "ok" or "error", besides the id, got error, ok'),
    ("bad-array", "blocks.free", "expected values as JSON, got array: "),
    (
        "exits",
        "blocks.free",
        "expected a reply, got none: the process ended with exit code 3; last line of stderr: 'out of luck'",
    ),
    ("hangs", "blocks.free", "expected a reply within 1 s, got none: the call was still running"),
    ("hello-garbage", "hello", "expected a line of JSON, got 'Welcome to pool 1.0!'"),
    ("hello-odd-family", "hello", "families: expected some of "),
    (
        "knows-everything",
        "an unknown operation: error NotOffered",
        "expected the error NotOffered, got a result",
    ),
    ("takes-anything", "blocks.new with num_blocks -1: error ConfigError", "expected the error ConfigError, got a result"),
    ("remembers", "second hello: earlier objects no longer exist", "call on an earlier object: expected an error, got a result"),
    ("says-words", "blocks.num_free", "expected an integer, got str 'five'"),
    ("raises", "blocks.allocate", "expected a result, got the error Segfault: refused"),
    ("stays", "bye: the program ends with exit code 0", "the program did not end, and was killed"),
    ("leaves-badly", "bye: the program ends with exit code 0", "exit code 9"),
]


@pytest.mark.parametrize(("way", "what", "wrong"), WAYS, ids=[way for way, *_ in WAYS])
def test_what_is_wrong_with_the_plumbing_is_said_in_words(way, what, wrong):
    said = list(run_selftest([sys.executable, str(HERE / "misbehaving_program.py"), way, "1"], HERE, False, 1.0))
    found = {each.what: each.wrong for each in said if each.wrong}
    assert found[what].startswith(wrong)
    assert len(found) <= 5


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("", "--selftest: expected a program"),
        ("./absent", "no program './absent' in "),
        ("it's", "--selftest it's: No closing quotation"),
    ],
)
def test_a_mistake_costs_one_line(command, message):
    line = [sys.executable, "-m", "kvref_conformance.cli", "harness", "--selftest", command]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"kvref: {message}")
