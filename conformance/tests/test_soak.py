"""kvref soak: short runs of correct and wrong caches, and the failures that it keeps."""

import json
from itertools import islice

import numpy as np
import pytest
from bugs.plant import in_source
from commandline import kvref

from kvref import backend
from kvref_conformance.implementations.backends import OnBackend
from kvref_conformance.runner.capabilities import probe_operations
from kvref_conformance.runner.check_runner import CheckRunner
from kvref_conformance.soak import cache_soak
from kvref_conformance.soak.cache_soak import run_soak
from kvref_conformance.soak.cache_workload import (
    EDITS,
    Workload,
    WorkloadEvent,
    merge_steps_into_prompts,
    one_token_per_request,
    without_requests,
)
from kvref_conformance.soak.drivers import soak_families

__all__ = ["kvref"]

WRONG = """
import kvref
from kvref.block_tables import BlockTables
from kvref_conformance.implementations.backends import OnBackend

class Tables(BlockTables):
    def slots(self, *where):
        return super().slots(*where) % 1500  # past 1,500 slots two tokens share one

class Wraps(OnBackend):
    name = "wraps"
    contiguous = quantized = tiered = pooled = recurrent = None
    def __init__(self):
        super().__init__(kvref.backend("numpy"))
    def paged(self, **config):
        cache = super().paged(**config)
        cache._tables = Tables(cache.config.num_layers, cache.config.block_size)
        return cache

class Tires(Wraps):
    def paged(self, **config):
        import os
        cache = OnBackend.paged(self, **config)
        def drop(sequence):
            os._exit(3)
        cache.drop = drop
        return cache
"""


def test_a_right_cache_keeps_every_token(kvref, tmp_path):
    done = kvref("soak", "numpy", "--family", "paged", "--minutes", "0.05", "--json", "out.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert " checked tokens were right" in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    said = json.loads((tmp_path / "out.json").read_text())
    (paged,) = said["families"]
    assert paged["tokens_checked"] > 0 and paged["memory"] and paged["failed"] is None
    assert not (tmp_path / ".kvref").exists()


def test_a_wrong_cache_is_named_and_kept(kvref, tmp_path):
    (tmp_path / "wrong.py").write_text(WRONG)
    done = kvref("soak", "wrong:Wraps", "--family", "paged", "--minutes", "0.1")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "\n    expected " in done.stdout and "\n    got      " in done.stdout
    assert "not conformant: breaks LAW-18 (paged)" in done.stdout
    trace = tmp_path / ".kvref/failures/LAW-18-paged-wrong+Wraps.jsonl"
    assert json.loads(trace.read_text().splitlines()[0])["judge"] == "model"
    again = kvref("replay", str(trace), "wrong:Wraps")
    assert again.returncode == 1 and "first mismatch" in again.stdout


def test_one_that_ends_its_process_is_a_failure(kvref, tmp_path):
    (tmp_path / "wrong.py").write_text(WRONG)
    done = kvref("soak", "wrong:Tires", "--family", "paged", "--minutes", "0.1")
    assert done.returncode == 1
    assert "the process ended with exit code 3" in done.stdout


def test_it_shows_what_it_called_and_what_it_did_not(kvref, tmp_path):
    done = kvref("soak", "numpy", "--family", "contiguous", "--minutes", "0.05", "--json", "out.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "contiguous calls: append " in done.stdout
    assert "contiguous not exercised: " in done.stdout and "reorder" in done.stdout
    (family,) = json.loads((tmp_path / "out.json").read_text())["families"]
    assert family["operations"]["truncate"] and "reorder" in family["not_exercised"]


def test_a_soak_of_a_paged_cache_calls_every_operation():
    for family in ("paged", "prefix"):
        judge = CheckRunner(OnBackend(backend("numpy")))
        soaked = run_soak(judge, family, 0, 60.0, 700)
        assert soaked.failure is None and soaked.figures.refused
        provided = {op.partition(".")[2] for op in probe_operations(judge, [family])[family].operations}
        assert provided <= set(soaked.figures.operations)


@pytest.fixture
def small(monkeypatch):
    """A judge of recurrent caches, and soaks with the sizes in which a failure is shortened."""
    monkeypatch.setattr(cache_soak, "FULL_SIZES", cache_soak.SMALL_SIZES)
    monkeypatch.setattr(cache_soak, "SHRINK_SECONDS", 0)
    return CheckRunner(OnBackend(backend("numpy")))


def test_a_soak_of_a_recurrent_cache_calls_every_operation(small):
    soaked = run_soak(small, "recurrent", 0, 60.0, 120)
    assert soaked.failure is None
    provided = {op.partition(".")[2] for op in probe_operations(small, ["recurrent"])["recurrent"].operations}
    assert provided <= set(soaked.figures.operations)


STATES = "kvref.recurrent.RecurrentCache."


@pytest.mark.parametrize(
    "plant",
    [
        (STATES + "truncate", "self._copy(source,", "self._copy(self._slots(state.block),"),
        (STATES + "begin", "if hit else None", "if not hit else None"),
        (STATES + "fork", "self._slots(parent.block)", "None"),
        (STATES + "append_batch", "zip(states, rows", "zip(states[::-1], rows"),
        (STATES + "receive", "self._spans(spare, part)", "self._spans(spare, part)[:0]"),
        (STATES + "_release", "self.pool.free(state.checkpoints.pop(length))", "state.checkpoints.pop(length)"),
    ],
    ids=lambda plant: plant[0].rpartition(".")[2],
)
def test_a_short_soak_of_a_recurrent_cache_finds_a_bug_in(plant, small, monkeypatch):
    in_source(monkeypatch, *plant)
    soaked = run_soak(small, "recurrent", 0, 60.0, 120)
    assert soaked.failure is not None and soaked.failure.violation is not None


# Bugs that a soak of seconds has to find: in fork, truncate, release, drop, save, and in calls without room.
OWNER, PAGES, TABLES = (
    "kvref.block_sequences.BlockOwner.",
    "kvref.block_sequences.PagedSequences.",
    "kvref.block_tables.BlockTables.",
)
CUT, RELEASE = OWNER + "_set_lengths", PAGES + "release_before"
SOAKED = {
    "a write to a shared block changes the fork": (
        OWNER + "_needs_copy", "self.pool.shared(blocks)", "np.zeros(np.shape(blocks), bool)",
    ),
    "a fork forgets the last token": (
        TABLES + "fork", "self.lengths[table], self", "self.lengths[table] - 1, self",
    ),
    "truncate frees the last block too": (
        CUT, "self._tables.entries_for(int(self._tables.lengths[table].max()))",
        "int(self._tables.lengths[table].max()) // self._tables.block_size",
    ),
    "truncate changes nothing": (CUT, "= lengths", "= self._tables.lengths[table]"),
    "release frees one block too many": (RELEASE, "table, position", "table, 1 + position"),
    "release frees nothing": (RELEASE, "self.pool.free_many(", "("),
    "drop frees nothing of the first block": (TABLES + "close", "self.cut(table, 0)", "self.cut(table, 1)"),
    "a call without room loses blocks": (
        OWNER + "_make_writable", "raise OutOfBlocks", "self.pool._num_free -= 1; raise OutOfBlocks",
    ),
    "a step without room adds a token": (
        "kvref.paged.PagedCache.append_step", "self._make_writable(",
        "self._tables.lengths[tables[:1]] += 1; self._make_writable(",
    ),
    "save swaps the layers": (
        "kvref.paged.PagedCache.contents", "self._token_spans(table, extent, part))",
        "self._token_spans(table, extent, part)[2:] + self._token_spans(table, extent, part)[:2])",
    ),
}  # fmt: skip


@pytest.mark.parametrize("plant", SOAKED.values(), ids=SOAKED)
def test_a_short_soak_finds(plant, monkeypatch):
    in_source(monkeypatch, *plant)
    monkeypatch.setattr(cache_soak, "SHRINK_SECONDS", 0)
    soaked = run_soak(CheckRunner(OnBackend(backend("numpy"))), "paged", 0, 60.0, 700)
    assert soaked.failure is not None and soaked.failure.violation is not None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("numpy", "--minutes", "0"), "--minutes: expected a finite number above 0, got 0"),
        (("numpy", "--minutes", "inf"), "--minutes: expected a finite number above 0, got inf"),
        (("numpy", "--minutes", "nan"), "--minutes: expected a finite number above 0, got nan"),
        (("numpy", "--timeout", "0"), "--timeout: expected at least 0.01, got 0"),
        (("numpy", "--timeout", "nan"), "--timeout: expected at least 0.01, got nan"),
        (("numpy", "--seed", "-1"), "--seed: expected an integer of at least 0, got -1"),
        (("numpy", "--family", "rows"), f"--family: expected one of {', '.join(soak_families())}, got 'rows'"),
        (("mine:OnlyKernels",), f"nothing to soak, it does not offer {' or '.join(soak_families())}"),
        ((), "expected an implementation: NAME, --exec COMMAND"),
    ],
)  # fmt: skip
def test_nonsense_is_one_line(kvref, arguments, said):
    done = kvref("soak", *arguments)
    assert done.returncode == 2
    assert said in done.stderr and done.stderr.count("\n") == 1


class Room:
    """A server with room for everything that only stores the number of tokens of each request."""

    max_sequences, max_tokens = 8, 1000

    def __init__(self):
        self.held = {}

    def running_requests(self):
        return list(self.held)

    def fits(self, numbers, tokens=1):
        return True

    def allows_length(self, tokens):
        return True

    def tokens(self, number):
        return self.held[number]

    def run_event(self, event):
        for number in event.numbers:
            if event.kind == "admit":
                self.held[number] = event.tokens
            elif event.kind == "step":
                self.held[number] += 1
            elif event.kind == "drop":
                del self.held[number]


def run(seed, count=3000):
    server, events = Room(), []
    for event in islice(Workload(server, np.random.default_rng(seed)).events(), count):
        server.run_event(event)
        events.append(event)
    return events


def test_the_same_seed_gives_the_same_workload():
    assert run(1) == run(1) != run(2)


def test_a_workload_has_everything_in_it():
    events = run(0)
    assert {event.kind for event in events} == {"admit", "step", "look", "drop", *EDITS}
    assert any(event.shared for event in events)
    lengths = [event.tokens for event in run(0, 20_000) if event.kind == "admit"]
    assert max(lengths) > 4 * min(lengths)


def test_events_are_made_fewer():
    events = [
        WorkloadEvent("admit", (0,), 10),
        WorkloadEvent("admit", (1,), 5),
        WorkloadEvent("step", (0, 1)),
        WorkloadEvent("step", (1,)),
        WorkloadEvent("look", (1,)),
    ]
    assert without_requests(events, lambda number: number == 0) == [events[1], WorkloadEvent("step", (1,)), *events[3:]]
    assert merge_steps_into_prompts(events) == [
        WorkloadEvent("admit", (0,), 11),
        WorkloadEvent("admit", (1,), 7),
        WorkloadEvent("look", (1,)),
    ]
    assert [event.tokens for event in one_token_per_request(events)][:2] == [1, 1]
