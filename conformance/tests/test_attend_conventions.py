"""A failure of `attend` names the convention by which its output is right."""

import numpy as np
import pytest

import kvref
from kvref.backend import ReferenceBackend
from kvref_conformance.implementations.backends import OnBackend
from kvref_conformance.runner.check_runner import CheckRunner, select_checks
from kvref_conformance.runner.options import Effort

CAUSAL = " (right if attention is causal, with the queries of the last tokens)"
FROM_THE_START = " (right if attention is causal, with the queries of the first tokens)"
NOT_CAUSAL, REVERSED = " (right if attention is not causal)", " (right if the queries are in reverse order)"


def causal(query, keys, values, scale):
    return kvref.attention(query, keys, values, scale=scale, causal=True)


def from_the_start(query, keys, values, scale):
    count = range(1, len(query) + 1)
    rows = [kvref.attention(query[at - 1 : at], keys[:at], values[:at], scale=scale) for at in count]
    return np.concatenate([np.zeros_like(query[:0]), *rows])


def not_causal(query, keys, values, scale):
    return kvref.attention(query, keys, values, scale=scale)


def in_reverse(query, keys, values, scale):
    return kvref.attention(query, keys, values, scale=scale)[::-1]


def unscaled(query, keys, values, scale):
    return kvref.attention(query, keys, values, scale=1.0)


def paged(attend):
    class Cache(kvref.PagedCache):
        def attend(self, sequence, layer, query, scale=None, causal=False):
            super().attend(sequence, layer, query, scale)
            return attend(query, *self.gather(sequence, layer), scale)

    return {"paged": lambda self, **config: Cache(kvref.PagedConfig(**config))}


def tiered(attend):
    class Cache(kvref.TieredCache):
        def attend(self, query, scale=None, causal=False):
            super().attend(query, scale)
            return attend(query, *self.read(), scale)

    return {"tiered": lambda self, **config: Cache(kvref.TieredConfig(**config))}


def latent(attend):
    class Cache(kvref.LatentCache):
        def attend(self, query, up_keys, up_values, scale=None, causal=False):
            return super().attend(query, up_keys, up_values, scale, not causal)

    return {"latent": lambda self, **config: Cache(kvref.LatentConfig(**config))}


class Function:
    def __init__(self, attend):
        self.attend = attend

    def attention(self, query, keys, values, scale, causal, length):
        return self.attend(query, keys[:length], values[:length], scale)


def function(attend):
    return {"attention": lambda self: Function(attend)}


@pytest.mark.parametrize(
    ("make", "attend", "clause", "note"),
    [
        (paged, causal, "ATTN-10", CAUSAL),
        (paged, from_the_start, "ATTN-10", FROM_THE_START),
        (paged, in_reverse, "ATTN-10", REVERSED),
        (paged, unscaled, "ATTN-10", " (right if the scale is 1)"),
        (tiered, causal, "ATTN-10", CAUSAL),
        (latent, None, "MLA-02", CAUSAL),
        (function, not_causal, "ATTN-04", NOT_CAUSAL),
        (function, from_the_start, "ATTN-04", FROM_THE_START),
    ],
)
def test_the_failure_names_the_convention(make, attend, clause, note):
    wrong = type("Wrong", (OnBackend,), make(attend))(ReferenceBackend())
    (family,) = make(attend)
    ((_, checks),) = select_checks(clause, family).items()
    runner = CheckRunner(wrong, Effort())
    shown = [each.got for each in runner.judge_clause([check for check in checks if check.run]) if each.evidence]
    assert any(note in got for got in shown), shown


def test_an_output_that_is_wrong_by_every_convention_gets_no_note():
    wrong = type("Wrong", (OnBackend,), paged(lambda *given: not_causal(*given) + np.float32(1)))(ReferenceBackend())
    ((_, checks),) = select_checks("ATTN-10", "paged").items()
    shown = [each.got for each in CheckRunner(wrong, Effort()).judge_clause(checks) if each.evidence]
    assert shown and not any("right if" in got for got in shown)
