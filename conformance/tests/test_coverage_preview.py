"""Coverage forecast for the operations of an implementation: `kvref check NAME --list`."""

import json
import re
import sys
from pathlib import Path

import pytest
from restricted import KERNELS, Restricted

import kvref
from kvref_conformance.drivers.json_client import JsonClient
from kvref_conformance.implementations.backends import OnBackend
from kvref_conformance.runner.capabilities import preview_coverage, probe_operations
from kvref_conformance.runner.check_runner import CheckRunner, select_checks
from kvref_conformance.runner.harness_selftest import run_selftest

HERE = Path(__file__).parent
APPENDS = Restricted(operations=["paged.create", "paged.append", "paged.gather", "paged.drop"], families=["paged"])
SMALLEST = Restricted(operations=["contiguous.append", "contiguous.read"], families=["contiguous"])

NOT_LOOKED_AT = "not included: LAW-18, whose checks take longer\n"

CACHES = """
import kvref
from kvref_conformance.implementations.backends import OnBackend

class NotOffered(Exception): pass

class Own(OnBackend):
    def __init__(self): super().__init__(kvref.reference)

class Declines(Own):
    def blocks(self, num_blocks):
        class Pool(kvref.BlockPool):
            def allocate(self):
                return super().allocate_many(1)[0]
            def allocate_many(self, count):
                raise NotOffered("several at once")
        return Pool(num_blocks)

class Unmade(Own):
    def paged(self, **config):
        raise NotOffered("caches on\\nSundays")

class Contradicts(Own):
    limits = {"head_dim": {"least": 64, "most": 32}}

class Unknown(Own):
    limits = {"head_dims": 64}

class Dies(Own):
    def blocks(self, num_blocks):
        import os
        os._exit(3)
"""


def of(implementation, *families):
    return probe_operations(CheckRunner(implementation), families)


def reached(implementation, family, clauses="*"):
    found = preview_coverage(implementation, of(implementation, family), select_checks(clauses, family))
    return {reach.clause: reach for reach in found.reaches}, {gain.operation: gain for gain in found.gains}


def test_what_is_there_is_offered():
    assert set(of(APPENDS, "paged", "blocks")) == {"paged"}
    assert sorted(of(APPENDS, "paged")["paged"].operations) == ["paged.append", "paged.create", "paged.drop", "paged.gather"]
    every = of(Restricted(), "buffers", "rows", "quantized")
    assert [each.missing for each in every.values()] == [[], [], []]
    assert "buffer.extend" in every["buffers"].operations


class NotOffered(Exception):
    """Declines an operation."""


class StepsEvenLayers(OnBackend):
    """append_step needs layers of equal length, or raises NotOffered with this reason."""

    reason = ""

    def __init__(self):
        super().__init__(kvref.reference)

    def paged(self, **config):
        cache = super().paged(**config)
        step = cache.append_step

        def append_step(sequences, keys, values):
            uneven = any(len({cache.length(each, layer) for layer in range(config["num_layers"])}) > 1 for each in sequences)
            if self.reason or uneven:
                raise NotOffered(self.reason or "layers of different lengths")
            step(sequences, keys, values)

        cache.append_step = append_step
        return cache


class DeclinesSteps(StepsEvenLayers):
    reason = "one layer at a time"


def test_append_step_is_called_with_layers_of_equal_length_and_its_reason_is_kept():
    status = probe_operations(CheckRunner(StepsEvenLayers()), ["paged"])["paged"]
    assert "paged.append_step" in status.operations and not status.reasons
    status = probe_operations(CheckRunner(DeclinesSteps()), ["paged"])["paged"]
    assert (status.missing, status.reasons) == (["paged.append_step"], {"paged.append_step": "one layer at a time"})


def test_what_only_sizes_within_its_limits_are_taken_of_is_offered():
    assert of(KERNELS, "paged")["paged"].missing == []
    writes = Restricted({"num_layers": 1, "tokens": {"most": 1}}, ["paged.create", "paged.write"])
    assert of(writes, "paged")["paged"].operations == ["paged.create", "paged.write"]


def test_over_a_pipe_it_is_what_is_not_declined(monkeypatch):
    monkeypatch.chdir(HERE)
    program = JsonClient([sys.executable, str(HERE / "serve.py"), "test_coverage_preview:SMALLEST"], HERE)
    try:
        found = of(program, "contiguous")["contiguous"]
        assert found.operations == ["contiguous.append", "contiguous.read"]
        reaches, _ = reached(program, "contiguous", "LAW-04,LAW-08")
        assert reaches["LAW-04"].judged and not reaches["LAW-08"].judged
        assert reaches["LAW-08"].missing == ["memory shared with the judge, which cannot be observed through a pipe"]
    finally:
        program.close()


def test_the_selftest_calls_declined_what_the_judge_would_make_of_others(monkeypatch):
    monkeypatch.chdir(HERE)
    program = [sys.executable, str(HERE / "serve.py"), "test_coverage_preview:SMALLEST"]
    said = run_selftest(program, HERE, show_stderr=False, timeout=10)
    declined = {each.what for each in said if each.declined}
    assert {"contiguous.seq_len", "contiguous.raw"} <= declined
    assert "contiguous.append" not in declined


def test_a_clause_is_judged_directly_through_others_in_part_or_not():
    reaches, gains = reached(APPENDS, "paged", "PAGED-01,PAGED-15,LAW-04,LAW-12")
    assert reaches["LAW-12"].how == reaches["PAGED-01"].how == "directly"
    assert reaches["LAW-04"].how == "derived"
    assert "paged.write through length and append" in reaches["LAW-04"].through
    assert reaches["PAGED-15"].how == "not offered"
    assert gains["paged.utilization"].clauses == ["PAGED-15"]
    assert "paged.create" not in gains


@pytest.mark.extended
def test_what_one_operation_more_brings_is_what_is_judged_with_it():
    _, gains = reached(SMALLEST, "contiguous")
    for op, gain in gains.items():
        more = Restricted(operations=["contiguous.append", "contiguous.read", op], families=["contiguous"])
        before, after = (sum(reach.judged for reach in reached(each, "contiguous")[0].values()) for each in (SMALLEST, more))
        assert after - before == gain.checks > 0
    counts = [gain.checks for gain in gains.values()]
    assert counts == sorted(counts, reverse=True)


@pytest.fixture
def caches(tmp_path):
    (tmp_path / "caches.py").write_text(CACHES)


def test_the_command_says_what_is_judged_and_what_would_bring_more(kvref, caches, tmp_path):
    done = kvref("check", "caches:Declines", "--list", "--family", "blocks", "--json", "out.json")
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    assert re.fullmatch(r"blocks: \d+ of \d+ clauses can be judged", lines[0])
    assert "  missing   allocate_many (several at once)" in lines
    assert ["BLOCK-07", "not", "offered", "allocate_many"] in [line.split() for line in lines]
    assert lines[-2].startswith("offer blocks.allocate_many: ")
    assert max(map(len, lines)) <= 80
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["families"]["blocks"]["missing"] == ["blocks.allocate_many"]
    assert document["gains"][0]["operation"] == "blocks.allocate_many"
    how = {each["clause"]: each["how"] for each in document["families"]["blocks"]["clauses"]}
    assert (how["BLOCK-05"], how["BLOCK-07"]) == ("directly", "not offered")
    assert not (tmp_path / ".kvref").exists()  # nothing was judged


def test_all_that_is_offered_takes_a_line(kvref):
    done = kvref("check", "numpy", "--list", "--family", "blocks")
    line, _ = done.stdout.splitlines()
    count = len(select_checks(family="blocks")) - 1  # without LAW-18
    assert line == f"blocks: {count} of {count} clauses can be judged"


def test_what_cannot_be_made_is_said(kvref, caches):
    done = kvref("check", "caches:Unmade", "--list", "--family", "paged")
    assert (done.returncode, done.stdout) == (0, "paged: no object can be made: caches on Sundays\n" + NOT_LOOKED_AT)


def test_without_a_name_the_checks_are_listed(kvref):
    done = kvref("check", "--list", "--clause", "BLOCK-05")
    assert done.returncode == 0
    assert done.stdout.splitlines()[:2] == [
        "BLOCK-05 · A block cannot be freed twice",
        "  free twice raises (blocks)",
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing-of-that-name", "no implementation 'nothing-of-that-name': "),
        ("caches:Contradicts", "caches:Contradicts: limits: head_dim: least 64 is above most 32"),
        ("caches:Unknown", "caches:Unknown: limits: head_dims: no such size: did you mean head_dim?"),
        ("caches:Dies", "caches:Dies: blocks.new: expected a reply, got none: "),
    ],
)
def test_a_mistake_costs_one_line(kvref, caches, name, message):
    done = kvref("check", name, "--list")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith(f"kvref: {message}")
