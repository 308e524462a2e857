"""The state machines reach every listed state, and the counters of states are right for traces worked out by hand."""

import itertools
import time
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis.internal.conjecture import engine as hypothesis_engine
from hypothesis.internal.conjecture.engine import ConjectureRunner
from hypothesis.internal.conjecture.providers import HypothesisProvider

from kvref.backend import ReferenceBackend, backend
from kvref.errors import PositionOutOfRange
from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import CannotRun
from kvref_conformance.families import all_families
from kvref_conformance.fuzz.findings import Search
from kvref_conformance.fuzz.hypothesis_runner import families_with_machine, run_machine
from kvref_conformance.fuzz.pair_coverage import all_pairs, pairs_in, why_impossible
from kvref_conformance.fuzz.state_coverage import count_pairs, count_reached_states, random_sequences, reached_states
from kvref_conformance.fuzz.state_registry import STATES
from kvref_conformance.implementations import load_implementation
from kvref_conformance.implementations.backends import OnBackend
from kvref_conformance.oracle.expectations import UnjudgedReply
from kvref_conformance.oracle.model_runner import ModelRunner

SEQUENCES = {
    "paged": 300,
    "prefix": 300,
    "grouped": 200,
    "recurrent": 200,
    "compressed": 200,
    "engine": 300,
    "blocks": 200,
    "transfer": 200,
}  # number of call sequences; others: 100
LEAST = 1  # sequences that must reach a state
LARGE = ("paged", "prefix", "grouped", "recurrent", "engine")  # families whose sequences take a minute


@pytest.mark.parametrize(
    ("kind", "name"), [(HypothesisProvider, "_maybe_draw_constant"), (ConjectureRunner, "generate_mutations_from")]
)
def test_a_hypothesis_without_a_replaced_method_is_refused(monkeypatch, kind, name):
    monkeypatch.delattr(kind, name)
    with pytest.raises(CannotRun, match=rf"has no \w+\.{name}: install a version that kvref was tried with, 6\.132 to"):
        run_machine("blocks", Search(OnBackend(backend("numpy"))), 0, 1, 1)


def test_a_seed_finds_the_same_failures_on_a_slow_machine(monkeypatch):
    def findings():
        search = Search(load_implementation("zoo:blocks-freed-twice"))
        run_machine("blocks", search, 0, 60, 20)
        calls = {clause: [each.request.op for each in found.call_trace] for clause, found in search.findings.items()}
        return search.begun, calls

    usual, seconds = findings(), itertools.count(0, 11)
    slow = SimpleNamespace(monotonic=lambda: next(seconds), perf_counter=time.perf_counter)
    monkeypatch.setattr(hypothesis_engine, "time", slow)
    assert findings() == usual and usual[1]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # extreme numbers
@pytest.mark.parametrize(
    "family",
    [pytest.param(each, marks=pytest.mark.long if each in LARGE else pytest.mark.extended) for each in families_with_machine()],
)
def test_a_machine_meets_the_states_and_the_pairs_of_operations_of_its_family(family):
    examples, implementation = SEQUENCES.get(family, 100), OnBackend(backend("numpy"))
    sequences = random_sequences(implementation, family, examples=examples)
    assert len(sequences) > examples * 9 // 10  # a few begin with an error
    counts = count_reached_states(family, sequences, implementation)
    if family == "prefix":
        implementation = OnBackend(backend("numpy"), token_hits=True)
        counts += count_reached_states(family, random_sequences(implementation, family, examples=examples), implementation)
    assert {name for name in STATES[family] if counts[name] < LEAST} == set()
    met, possible = set(count_pairs(family, sequences)), {pair for pair in all_pairs(family) if not why_impossible(pair)}
    assert met <= possible
    assert len(possible - met) <= 1 + len(all_pairs(family)) // 30  # a few can be missing by chance
    named = {clause for sequence in sequences[:40] for clause in named_clauses(sequence)}
    assert named <= set(all_families()[family].speaks_for)


def named_clauses(sequence):
    """The clauses that a wrong reply to one of the calls would break."""
    models = ModelRunner("exact")
    for exchange in sequence:
        expected = models.expect(exchange.request)
        models.judge(exchange, expected)
        if not isinstance(expected, UnjudgedReply):
            yield expected.clause


def rows(count, heads=1, dim=2):
    return np.arange(1, count * heads * dim + 1, dtype=np.float32).reshape(count, heads, dim)


@pytest.fixture
def subject():
    return Subject(OnBackend(ReferenceBackend()), np.random.default_rng(0))


def paged(subject, **changes):
    sizes = {"num_blocks": 6, "block_size": 2, "num_layers": 1, "num_kv_heads": 1, "head_dim": 2, "dtype": "float32"}
    return subject.new("paged", **sizes | changes)


def test_a_pair_needs_a_common_sequence_and_nothing_read_between(subject):
    cache = paged(subject)
    first, second = cache.create(), cache.create()
    cache.write(first, 0, 0, rows(3), rows(3))
    cache.truncate(second, 0)  # another sequence
    cache.truncate(first, 2)
    cache.length(first, 0)
    cache.release_before(first, 2)
    cache.drop(cache.fork(first))
    with pytest.raises(PositionOutOfRange):
        cache.truncate(second, 9)
    cache.drop(second)
    found = {(a.split(".")[1], b.split(".")[1]): states for (a, b), states in pairs_in("paged", subject.call_trace).items()}
    assert found == {
        ("create", "create"): set(), ("release_before", "fork"): {"after a release"},
        ("fork", "drop"): {"after a release", "after a fork"},
    }  # fmt: skip


def test_a_drop_of_an_empty_sequence_is_no_state(subject):
    cache = paged(subject)
    cache.drop(cache.create())
    assert reached_states("paged", subject.call_trace) == set()


def test_a_partly_filled_block_is_dropped_and_used_again(subject):
    cache = paged(subject)
    first = cache.create()
    cache.write(first, 0, 0, rows(3), rows(3))
    cache.block_table(first, 0)  # without this call the freed blocks are unknown
    cache.drop(first)
    second = cache.create()
    cache.write(second, 0, 0, rows(1), rows(1))
    cache.block_table(second, 0)
    cache.gather(second, 0)
    assert reached_states("paged", subject.call_trace) == {
        "a dropped sequence has a partly filled last block",
        "a dropped sequence has several blocks a layer",
        "a block of a dropped sequence is read by another",
        "a reused block is partly filled",
    }


def test_where_a_write_starts_and_ends(subject):
    cache = paged(subject)
    sequence = cache.create()
    met_before = set()
    for start, count, name in (
        (0, 3, None),
        (2, 1, "tokens are overwritten inside a partly filled block"),
        (1, 2, "tokens are overwritten across a block border"),
        (0, 2, None),  # exactly a full block
        (3, 1, "a write fills a block that was begun"),
        (4, 1, None),
        (4, 2, "a write overwrites tokens and goes past the end"),
        (6, 1, None),
        (7, 2, "a write starts in a partly filled block and ends in another"),
    ):
        cache.write(sequence, 0, start, rows(count), rows(count))
        now = reached_states("paged", subject.call_trace)
        assert now - met_before == ({name} if name else set())
        met_before = now


def test_a_batch_that_names_sequences_again(subject):
    cache = paged(subject)
    first, second = cache.create(), cache.create()
    cache.append([first, first, first], 0, rows(3), rows(3))
    assert reached_states("paged", subject.call_trace) == {
        "a batch names a sequence twice",
        "a batch names a sequence three times",
    }
    cache.append([first, second, first, second], 0, rows(4), rows(4))
    assert "a batch names two sequences twice" in reached_states("paged", subject.call_trace)


def test_a_buffer_with_memory_of_another(subject):
    pool = subject.new("buffers", max_buffers=1)
    first = pool.acquire(1024)
    first.extend(np.ones(3, np.float32))
    first.release()
    pool.acquire(100).extend(np.ones(2, np.float32))
    assert reached_states("buffers", subject.call_trace) == {
        "a buffer contains less than its memory did before", "acquire returns a free buffer",
    }  # fmt: skip


def test_eviction_while_every_tier_holds_tokens(subject):
    cache = subject.new(
        "tiered", num_kv_heads=1, head_dim=2, max_tokens=4, tail_length=1, tail_dtype="float32", warm_length=1, warm_format="q8",
        store_format="q4", migration_batch=9,
    )  # fmt: skip
    cache.append(rows(3), rows(3))
    assert reached_states("tiered", subject.call_trace) == set()
    cache.append(rows(2), rows(2))
    assert reached_states("tiered", subject.call_trace) == {
        "some tokens are evicted", "some tokens are evicted while every tier holds some",
    }  # fmt: skip


def test_every_state_is_one_of_a_family_with_a_machine():
    assert set(STATES) == set(families_with_machine())
    assert sum(map(len, STATES.values())) >= 130
