"""Correct caches that a check once failed because it assumed what no clause requires."""

import numpy as np
import pytest

import kvref
from kvref import errors
from kvref.rope import Rotary
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.implementations.backends import OnBackend
from kvref_conformance.runner.check_runner import CheckRunner, select_checks, verdict_of
from kvref_conformance.runner.options import Effort


class GroupsOfFour(kvref.PagedCache):
    def attend(self, sequence, layer, query, scale=None, causal=False):
        if query.shape[1] != 4 * self.config.num_kv_heads:
            raise errors.ShapeMismatch("query: expected four heads for each kv head")
        return super().attend(sequence, layer, query, scale, causal)


class FixedPoint(Rotary):
    """Cosines and sines are multiples of 2^-24: off by at most half a unit roundoff, as the derivation allows."""

    def turned(self, keys, by, backend):
        half = len(self.frequencies)
        angles, keys, rest = by * np.array(self.frequencies), keys[..., : 2 * half], keys[..., 2 * half :]
        cos, sin = ((np.round(part(angles) * 2**24) / 2**24).astype(np.float32) for part in (np.cos, np.sin))
        paired = self.layout == "pairs"
        first, second = (keys[..., 0::2], keys[..., 1::2]) if paired else (keys[..., :half], keys[..., half:])
        with np.errstate(over="ignore"):  # too large numbers are rejected when stored
            new = first * cos - second * sin, second * cos + first * sin
        return np.concatenate([np.stack(new, axis=-1).reshape(keys.shape), rest] if paired else [*new, rest], axis=-1)


class WithoutRoomAlone(kvref.PrefixCache):
    def ensure_capacity(self, sequence, num_tokens):
        raise NotOffered("room without tokens")

    def begin(self, tokens, salt=""):
        """Allocates the blocks that `kvref.PrefixCache` allocates by the method that is not offered here."""
        self.ensure_capacity = super().ensure_capacity
        try:
            return super().begin(tokens, salt)
        finally:
            del self.ensure_capacity


def judge_of(family, kind, limits=None):
    implementation = OnBackend(kvref.backend("numpy"))
    setattr(implementation, family, lambda **config: kind(kvref.PagedConfig(**config), implementation.backend))
    implementation.limits = limits or {}
    return CheckRunner(implementation, Effort(examples=5))


def blamed(judge, clause, family):
    ((_, checks),) = select_checks(clause, family).items()
    return verdict_of(judge.judge_clause(checks)) == "failed"


def test_attention_for_groups_of_one_size():
    assert not blamed(judge_of("paged", GroupsOfFour, {"group_size": 4}), "SHARE-05", "paged")


@pytest.mark.parametrize("seed", range(3))
def test_turns_as_far_off_as_the_bound_allows(monkeypatch, seed):
    monkeypatch.setattr("kvref.paged.Rotary", FixedPoint)
    judge = judge_of("paged", kvref.PagedCache)
    judge.effort = Effort(seed, examples=5)
    assert not blamed(judge, "EDIT-10", "paged")


def test_prefixes_where_room_comes_with_tokens_only():
    assert not blamed(judge_of("prefix", WithoutRoomAlone), "LAW-18", "prefix")


class FloatSixteen(kvref.LatentCache):
    """Computes in float32 and returns the only dtype that it accepts."""

    def attend(self, *query):
        with np.errstate(over="ignore"):
            return super().attend(*query).astype(np.float16)

    def read(self):
        return super().read().astype(np.float16)


class DividedAtTheEnd(kvref.GroupedCache):
    """Divides by the sum of the weights at the end, like FlashAttention."""

    def attend(self, sequence, layer, query, scale=None):
        right = super().attend(sequence, layer, query, scale)
        with np.errstate(all="ignore"):
            count = np.float32(self.length(sequence))
            return right * count / count


def limited(family, kind, config, limits, examples=5):
    implementation = OnBackend(kvref.backend("numpy"))
    setattr(implementation, family, lambda **sizes: kind(config(**sizes), implementation.backend))
    implementation.limits = limits
    return CheckRunner(implementation, Effort(examples=examples))


LIMITED = [  # family, cache, clause, limits
    ("grouped", kvref.GroupedCache, "GROUP-01", {"num_groups": 1, "num_layers": 1, "block_size": 16}),
    ("windowed", kvref.WindowedCache, "ATTN-07", {"sinks": 4, "rollback": 4}),
    ("windowed", kvref.WindowedCache, "ATTN-07", {"sinks": {"least": 1}, "chunk": {"least": 1}}),
    ("windowed", kvref.WindowedCache, "WIN-07", {"chunk": 0}),
    ("windowed", kvref.WindowedCache, "WIN-06", {"rollback": 0, "sinks": 0}),
]
CONFIGS = {"grouped": kvref.GroupedConfig, "windowed": kvref.WindowedConfig, "latent": kvref.LatentConfig}


@pytest.mark.parametrize(("family", "kind", "clause", "limits"), LIMITED)
def test_windows_and_groups_within_limits(family, kind, clause, limits):
    assert not blamed(limited(family, kind, CONFIGS[family], {family: limits}), clause, family)


def test_latents_that_are_answered_in_float16_overflow():
    judge = limited("latent", FloatSixteen, kvref.LatentConfig, {"dtype": "float16"}, examples=60)
    assert not blamed(judge, "MLA-02", "latent")


@pytest.mark.extended
def test_sums_of_values_that_are_divided_at_the_end_overflow():
    judge = limited("grouped", DividedAtTheEnd, kvref.GroupedConfig, {}, examples=60)
    assert not blamed(judge, "GROUP-04", "grouped")
