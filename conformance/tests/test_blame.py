"""The clause that a wrong state is attributed to: the one that was broken first, not that of a later call that raised."""

import re

import numpy as np
import pytest

import kvref
from kvref_conformance.calls.subject import Subject
from kvref_conformance.drivers.resource_limits import CallTimeouts
from kvref_conformance.exceptions import ClauseViolation
from kvref_conformance.families import all_families
from kvref_conformance.runner.check_runner import CheckRunner, select_checks
from kvref_conformance.runner.options import Effort
from kvref_conformance.traces.checked_session import CheckedSession


def implementation(**factories):
    """An implementation with these families, each a class of kvref's caches and its configuration."""
    made = {name: staticmethod(lambda cls=cls, of=of, **config: cls(of(**config))) for name, (cls, of) in factories.items()}
    members = {"name": "mine", "version": "1", "language": "python", "level": "exact", "formats": ("float32",)}
    return type("Mine", (), members | made | {"asarray": staticmethod(np.array), "to_numpy": staticmethod(np.asarray)})()


def judge(mine, clause, family):
    """The failed outcomes of the checks of one clause."""
    ((_, checks),) = select_checks(clause, family).items()
    return [each for each in CheckRunner(mine, Effort()).judge_clause(checks) if each.verdict == "failed"]


class LosesLongAppends(kvref.ContiguousCache):
    """Of more than ten tokens in one append, the last value is replaced."""

    def append(self, keys, values):
        values = np.array(values)
        if values.shape[2] > 10:
            values[:, :, 10:] = 5
        super().append(keys, values)


@pytest.mark.parametrize("clause", ["LAW-01", "LAW-08", "LAW-15"])
def test_a_law_does_not_blame_a_later_call_for_tokens_that_an_append_lost(clause):
    (failed,) = (
        each
        for each in judge(implementation(contiguous=(LosesLongAppends, kvref.ContiguousConfig)), clause, "contiguous")
        if each.evidence
    )
    assert failed.evidence.root_clause == "LAW-04"
    assert not any("raised" in call for call in failed.calls) and len(failed.calls) == 3  # new, append, read


def test_a_check_of_a_family_looks_before_the_call_that_raises():
    class LosesLastBlock(kvref.PagedCache):
        """The last of more than four tokens in one write is replaced."""

        def write(self, sequence, layer, start, keys, values):
            values = np.array(values)
            values[4:] = 5
            super().write(sequence, layer, start, keys, values)

    found = judge(implementation(paged=(LosesLastBlock, kvref.PagedConfig)), "LAW-01", "paged")
    shown = [each for each in found if each.evidence]
    assert {each.evidence.root_clause for each in shown} == {"LAW-04"} and len(found) == 2
    assert not any("raised" in call for each in shown for call in each.calls)


RIGHT, WRONG = np.ones((2, 2, 5), np.float32), np.ones((2, 9, 9), np.float32)  # the second has a wrong shape


class Careless:
    """A mixin: the call that raises loses the tokens."""

    careless = True

    def append(self, keys, values):
        try:
            super().append(keys, values)
        except kvref.errors.KVRefError:
            self.lost = self.careless or getattr(self, "lost", False)
            raise

    def read(self):
        keys, values = super().read()
        return keys, values + getattr(self, "lost", False)


class Forgetful(Careless):
    """A mixin: every append loses the tokens."""

    careless = False

    def append(self, keys, values):
        super().append(keys, values)
        self.lost = True


FAMILIES = {
    "tiered": (kvref.TieredCache, kvref.TieredConfig),
    "pooled": (kvref.PooledCache, kvref.PooledConfig),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("mixin", "looks", "raises", "expected"),
    [
        (Careless, True, True, True),
        (Careless, False, True, False),
        (Forgetful, False, True, False),
        (Forgetful, False, False, False),
    ],
)
def test_the_model_blames_a_call_that_raised_only_for_what_was_right_before(family, mixin, looks, raises, expected):
    cache, config = FAMILIES[family]
    wrong = type("Wrong", (mixin, cache), {})
    subject = Subject(implementation(**{family: (wrong, config)}), np.random.default_rng(0), CallTimeouts(), family)
    session = CheckedSession(subject)
    session.call(f"{family}.new", None, dict(all_families()[family].small))
    session.call(f"{family}.append", 1, {"keys": RIGHT, "values": RIGHT})
    if looks:
        session.call(f"{family}.read", 1, {})
    if raises:
        assert session.call(f"{family}.append", 1, {"keys": WRONG, "values": WRONG}) is None
    with pytest.raises(ClauseViolation) as found:
        session.call(f"{family}.read", 1, {})
    assert (found.value.clause == "LAW-01") == expected


class MatchesEveryPrompt(kvref.PrefixCache):
    """`match` finds every full block, whether it is committed or not."""

    def match(self, tokens, salt=""):
        super().match(tokens, salt)
        return max(0, len(tokens) - 1) // self.config.block_size * self.config.block_size


class ListsOtherBlocks(kvref.PrefixCache):
    """The table of a sequence with a hit lists another first block."""

    def begin(self, tokens, salt=""):
        sequence = super().begin(tokens, salt)
        self.hits = getattr(self, "hits", set()) | ({sequence} if self.length(sequence, 0) else set())
        return sequence

    def block_table(self, sequence, layer):
        table = np.array(super().block_table(sequence, layer))
        table[:1] = (table[:1] + (sequence in getattr(self, "hits", ()))) % self.config.num_blocks
        return table


def machine(cache):
    """The findings of the state machine of prefix, with several seeds."""
    found = {}
    for seed in range(4):
        found |= CheckRunner(implementation(prefix=(cache, kvref.PagedConfig)), Effort(seed)).search("prefix").findings
    return found


def test_a_hit_on_tokens_of_which_none_was_committed_breaks_prefix_04():
    findings = machine(MatchesEveryPrompt)
    assert "PREFIX-04" in findings
    committing = [each.request.op for each in findings["PREFIX-03"].call_trace] if "PREFIX-03" in findings else ["prefix.commit"]
    assert "prefix.commit" in committing


def test_an_expected_block_table_is_shown_as_a_table():
    violation = machine(ListsOtherBlocks)["PREFIX-01"].violation
    assert re.match(r"\[(\d+, )+other", violation.expected) and "; other: different blocks of [0, " in violation.expected
