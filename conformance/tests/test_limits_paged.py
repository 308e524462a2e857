"""The paged cache, attention and kernels with few operations, few sizes and one dtype: what is judged, which bugs are found."""

import numpy as np
import pytest
from api_subsets.append_only import AppendOnly
from api_subsets.errors import ConfigError
from api_subsets.one_table import Cache, OneTable
from restricted import KERNELS, Restricted

from kvref_conformance.limits import Limits
from kvref_conformance.oracle.attention import output_rounding
from kvref_conformance.oracle.formats.small_floats import MAX, round_to
from kvref_conformance.runner.check_runner import CheckRunner, select_checks, verdict_of
from kvref_conformance.runner.options import Effort


def behind(*operations):
    return Restricted({}, operations={f"paged.{name}" for name in operations}, families=("paged",))


BY_READING = behind("create", "drop", "ensure_capacity", "write", "read", "length", "utilization")
WITHOUT_COUNTS = behind("create", "drop", "write", "gather", "length")


def verdicts(implementation, chapter):
    """Verdicts by clause, of hand-written checks."""
    judge = CheckRunner(implementation, Effort())
    written_out = {
        clause.id: [check for check in checks if check.run] for clause, checks in select_checks(f"{chapter}-*").items()
    }
    return {clause: verdict_of(judge.judge_clause(checks)) for clause, checks in written_out.items()}


@pytest.mark.parametrize(
    ("implementation", "chapter", "missing"),
    [
        pytest.param(BY_READING, "PAGED", {"PAGED-06", "PAGED-16", "PAGED-17"}, id="by reading"),
        pytest.param(AppendOnly(), "PAGED", {f"PAGED-{n:02}" for n in (4, 6, 10, 11, 15, 17, 18)}, id="append only"),
        pytest.param(WITHOUT_COUNTS, "PAGED", {f"PAGED-{n:02}" for n in (4, 6, 15, 16, 17)}, id="without counts"),
        pytest.param(OneTable(), "PAGED", {f"PAGED-{n:02}" for n in (4, 6, 15, 16, 17, 18)}, id="one table"),
        pytest.param(KERNELS, "PAGED", {"PAGED-18"}, id="paged kernels"),
        pytest.param(KERNELS, "ATTN", set(), id="attention kernels"),
        pytest.param(KERNELS, "KERN", {"KERN-06"}, id="kernels"),
    ],
)
def test_what_can_be_shown_is_judged(implementation, chapter, missing):
    found = verdicts(implementation, chapter)
    assert {clause for clause, verdict in found.items() if verdict != "passed"} == missing
    assert "failed" not in found.values()


class EachLayerTakesItsOwn(Cache):
    """Declares one table for all layers, but layers other than the first return their blocks in reverse order."""

    def block_table(self, sequence, layer):
        table = super().block_table(sequence, layer)
        return table[::-1] if layer else table


class DroppedBlocksAreSharedOut(Cache):
    """The blocks of a dropped sequence are freed, but the sequence that was created before it keeps them too."""

    def drop(self, sequence):
        blocks = list(self.table(sequence))
        super().drop(sequence)
        for table in list(self.tables.values())[:1]:
            table += blocks


@pytest.mark.parametrize("cache", [EachLayerTakesItsOwn, DroppedBlocksAreSharedOut])
def test_a_wrong_table_for_all_layers_is_noticed(cache, monkeypatch):
    monkeypatch.setattr(OneTable, "paged", cache)
    assert verdicts(OneTable(), "PAGED")["PAGED-13"] == "failed"


@pytest.mark.parametrize("own", [[16], {"multiple_of": 16}, {"most": 9}], ids=str)
def test_limits_of_blocks_are_of_its_own_where_one_stands_for_all_layers(own, monkeypatch):
    allowed = Limits({"num_blocks": own}).limit("paged", "num_blocks")

    class Few(Cache):
        def __init__(self, num_blocks, **sizes):
            if not allowed.allows(num_blocks):
                raise ConfigError(f"num_blocks: expected {allowed}, got {num_blocks}")
            super().__init__(num_blocks, **sizes)

    monkeypatch.setattr(OneTable, "paged", Few)
    monkeypatch.setattr(OneTable, "limits", {"one_block_table": True, "num_blocks": own})
    found = verdicts(OneTable(), "PAGED")
    assert "failed" not in found.values()
    assert {found[clause] for clause in ("PAGED-01", "PAGED-02", "PAGED-07", "PAGED-13")} == {"passed"}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounding_an_output_lies_within_the_bound_and_not_much_more(dtype):
    rng = np.random.default_rng(0)
    want = rng.normal(size=10_000) * 2.0 ** rng.integers(-30, 15, 10_000)
    want = want[np.abs(want) < MAX[dtype] / 2].astype(np.float32)
    off = np.abs(round_to(want, dtype).astype(np.float64) - want)
    bound = output_rounding(want, np.zeros(len(want)), dtype)
    assert (off <= bound).all()
    assert (off > bound / 2).any()


class Half(Restricted):
    """Attention that returns the only dtype that it accepts."""

    by = 1.0

    def attention(self):
        own, by = self._base.attention(), self.by

        class Kernel:
            def attention(self, query, keys, values, **options):
                output = own.attention(query, keys, values, **options)
                return (output * np.float32(by)).astype(np.float16)

        return Kernel()


@pytest.mark.parametrize(("by", "verdict"), [(1.0, "passed"), (1 + 2.0**-10, "failed")])
def test_attention_may_answer_in_the_dtype_that_it_takes(by, verdict, monkeypatch):
    monkeypatch.setattr(Half, "by", by)
    assert verdicts(Half({"dtype": ["float16"]}, families=()), "ATTN")["ATTN-04"] == verdict
