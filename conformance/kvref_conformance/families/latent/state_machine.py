"""The state machine of the family `latent`."""

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvref_conformance.families.latent.model import Latent
from kvref_conformance.fuzz.base_machine import TOKEN_COUNT, TRUNCATION, FamilyStateMachine
from kvref_conformance.fuzz.row_generators import HUGE_KINDS, row_kinds
from kvref_conformance.fuzz.state_registry import NOTES, ModelCall, register_error_states, state
from kvref_conformance.oracle.formats import PACKED_FORMAT, group_of

SIZE = st.integers(1, 3)
DTYPES = (PACKED_FORMAT, "float32", PACKED_FORMAT, "bfloat16", "float16", "q8_0", "uint4_g32_bfloat16")


class LatentStateMachine(FamilyStateMachine):
    family = "latent"

    @initialize(
        rank=SIZE, tiles=st.sampled_from((2, 1, 2)), rope_dim=SIZE, most=st.sampled_from((3, 5, 8, 1)),
        dtype=st.sampled_from(DTYPES),
    )  # fmt: skip
    def new(self, rank: int, tiles: int, rope_dim: int, most: int, dtype: str) -> None:
        group = group_of(self.format_for(self.family, "dtype", dtype) or "")
        rank = 128 * tiles if dtype == PACKED_FORMAT else rank if group == 1 else group * tiles
        self.make_object(rank=rank, rope_dim=rope_dim if group == 1 else group, max_tokens=most, dtype=dtype)

    @property
    def model(self) -> Latent:
        model = self.models[self.objects[0]]
        assert isinstance(model, Latent)
        return model

    def edits(self, which: int) -> dict[str, Callable[[int], Any]]:
        self.edited = self.objects[0]
        append = {"append": lambda number: self.append(1 + number % 3, "uneven", "uneven", 1.0)}
        return append | self.cache_edits(lambda: len(self.model.tokens))

    @precondition(lambda self: self.objects)
    @rule(count=TOKEN_COUNT, kind=row_kinds(), rotated=row_kinds(), loud=st.sampled_from((2.0**9, 1.0)))
    def append(self, count: int, kind: str, rotated: str, loud: float) -> None:
        latent, rope = self._rows(count, self.model.rank, kind), self._rows(count, self.model.rope_dim, rotated)
        if kind not in HUGE_KINDS:
            latent[:, : self.model.rank // 2] *= np.float32(loud)  # the first tile if there are two
        self.call("append", self.objects[0], latent=self.source.round_to_dtype(latent), rope=rope)

    append_more = append

    def _rows(self, count: int, width: int, kind: str) -> np.ndarray:
        return self.source.rows((count, width), kind)

    @precondition(lambda self: self.objects)
    @rule(wrong=st.integers(0, 4), side=st.integers(0, 2))
    def append_wrongly(self, wrong: int, side: int) -> None:
        good = [self._rows(2, width, "counting") for width in (self.model.rank, self.model.rope_dim)]
        bad = [
            (part.astype(np.float64), part[:, 1:], part[0], part[None], self._rows(3, part.shape[1], "counting"))[wrong]
            for part in good
        ]
        latent, rope = ((bad[0], bad[1]), (good[0], bad[1]), (bad[0], good[1]))[side]
        self.call("append", self.objects[0], latent=latent, rope=rope)

    @precondition(lambda self: self.objects)
    @rule(queries=st.integers(1, 4), heads=SIZE, nope=SIZE, value=SIZE, causal=st.booleans(), kind=row_kinds(everything=False))
    def attend(self, queries: int, heads: int, nope: int, value: int, causal: bool, kind: str) -> None:
        heads, nope = self.subject.size("group_size", heads), self.subject.size("nope_dim", nope)
        value, rank = self.subject.size("value_dim", value), self.model.rank
        query = self._rows(queries * heads, nope + self.model.rope_dim, kind).reshape(queries, heads, -1)
        up_keys, up_values = (self.source.rows((heads, each, rank), "uneven") for each in (nope, value))
        self.call("attend", self.objects[0], query=query, up_keys=up_keys, up_values=up_values, scale=0.5, causal=causal)

    attend_more = attend

    @precondition(lambda self: self.objects)
    @rule(heads=SIZE, less=st.integers(0, 3))
    def attend_wrongly(self, heads: int, less: int) -> None:
        """Attends with one wrong size, or with a wrong dtype."""
        heads, rank = self.subject.size("group_size", heads), self.model.rank
        width, value = self.subject.size("nope_dim", 3), self.subject.size("value_dim", 2)
        query = self.source.rows((1, heads, width + self.model.rope_dim - (less == 0)), "counting")
        up_keys = self.source.rows((heads, width, rank + (less == 1)), "counting")
        up_values = self.source.rows((heads + (less == 2), value, rank), "counting")
        self.call_quietly(
            "attend", self.objects[0], query=query.astype(np.float64) if less == 3 else query, up_keys=up_keys,
            up_values=up_values, scale=0.5, causal=False,
        )  # fmt: skip

    @precondition(lambda self: self.objects)
    @rule()
    def records(self) -> None:
        self.call_quietly("records", self.objects[0])

    @precondition(lambda self: self.objects)
    @rule(back=TRUNCATION, count=TOKEN_COUNT, kind=row_kinds())
    def truncate(self, back: int, count: int, kind: str) -> None:
        self.call("truncate", self.objects[0], length=len(self.model.tokens) - back)
        self.append(count, kind, kind, 1.0)

    @precondition(lambda self: self.objects)
    @rule(count=TOKEN_COUNT, kind=row_kinds())
    def clear(self, count: int, kind: str) -> None:
        self.call("clear", self.objects[0])
        self.append(count, kind, kind, 1.0)


# The states of the latent cache that random call sequences should reach, because bugs depend on them.

register_error_states("latent", "ShapeMismatch", "DtypeMismatch", "PositionOutOfRange", "CapacityExceeded", "NonFinite")


@state("latent", "append", raising="CapacityExceeded")
def an_append_has_room_for_some_of_its_tokens(call: ModelCall) -> bool:
    return bool(0 < len(call.model.tokens) < call.model.room)


@state("latent", "append")
def it_is_filled_to_the_last_token(call: ModelCall) -> bool:
    return bool(call.tokens and len(call.model.tokens) + call.tokens == call.model.room)


@state("latent", "append")
def tokens_follow_a_truncate_of_some(call: ModelCall) -> bool:
    return call.model.last_change == "truncate" and call.tokens > 0 and bool(call.model.tokens)


@state("latent", "append")
def fewer_tokens_are_appended_after_a_clear(call: ModelCall) -> bool:
    return not call.model.tokens and 0 < call.tokens < call.history.max_tokens.get(call.on, 0)


@state("latent", "truncate")
def truncate_removes_some_tokens_and_keeps_some(call: ModelCall) -> bool:
    return bool(0 < call.args["length"] < len(call.model.tokens))


@state("latent", "records")
def several_records_are_read(call: ModelCall) -> bool:
    return len(call.model.tokens) > 1


@state("latent", "records")
def a_tile_of_small_values_is_beside_one_of_large_values(call: ModelCall) -> bool:
    model: Latent = call.model
    for latent, _ in model.tokens if model.dtype == PACKED_FORMAT else []:
        loudest = np.abs(latent.reshape(-1, 128)).max(axis=1).astype(np.float64)
        if 0 < 50 * loudest.min() < loudest.max():
            return True
    return False


@state("latent", "attend")
def several_heads_attend_to_several_tokens(call: ModelCall) -> bool:
    return call.args["query"].shape[1] > 1 and len(call.model.tokens) > 1


@state("latent", "attend")
def several_heads_attend_to_packed_rows(call: ModelCall) -> bool:
    return several_heads_attend_to_several_tokens(call) and call.model.dtype == PACKED_FORMAT


@state("latent", "attend")
def a_causal_query_sees_no_token_and_another_sees_some(call: ModelCall) -> bool:
    return bool(call.args["causal"] and 0 < len(call.model.tokens) < len(call.args["query"]))


@state("latent", "attend")
def causal_queries_see_all_but_the_last_tokens(call: ModelCall) -> bool:
    return bool(call.args["causal"] and 1 < len(call.args["query"]) < len(call.model.tokens))


@state("latent", "attend")
def attend_sees_no_token(call: ModelCall) -> bool:
    return not call.model.tokens


def note_latent(call: ModelCall) -> None:
    if call.op == "latent.clear" and call.model.tokens:
        call.history.max_tokens[call.on] = len(call.model.tokens)


NOTES["latent"] = note_latent
