"""The states of the latent cache that random call sequences should reach, because bugs depend on them."""

import numpy as np

from kvref_conformance.families.latent.model import Latent
from kvref_conformance.oracle.formats import PACKED
from kvref_conformance.searching.states import NOTES, Call, refusals, state

refusals("latent", "ShapeMismatch", "DtypeMismatch", "PositionOutOfRange", "CapacityExceeded", "NonFinite")


@state("latent", "append", raising="CapacityExceeded")
def some_of_the_tokens_would_fit(call: Call) -> bool:
    return bool(0 < len(call.model.tokens) < call.model.room)


@state("latent", "append")
def it_is_filled_to_the_last_token(call: Call) -> bool:
    return bool(call.tokens and len(call.model.tokens) + call.tokens == call.model.room)


@state("latent", "append")
def tokens_follow_a_truncate_of_some(call: Call) -> bool:
    return call.model.last == "truncate" and call.tokens > 0 and bool(call.model.tokens)


@state("latent", "append")
def fewer_tokens_are_appended_after_a_clear(call: Call) -> bool:
    return not call.model.tokens and 0 < call.tokens < call.past.most.get(call.on, 0)


@state("latent", "truncate")
def some_tokens_go_and_some_stay(call: Call) -> bool:
    return bool(0 < call.args["length"] < len(call.model.tokens))


@state("latent", "records")
def several_records_are_read(call: Call) -> bool:
    return len(call.model.tokens) > 1


@state("latent", "records")
def a_quiet_tile_lies_beside_a_loud_one(call: Call) -> bool:
    model: Latent = call.model
    for latent, _ in model.tokens if model.dtype == PACKED else []:
        loudest = np.abs(latent.reshape(-1, 128)).max(axis=1).astype(np.float64)
        if 0 < 50 * loudest.min() < loudest.max():
            return True
    return False


@state("latent", "attend")
def several_heads_attend_to_several_tokens(call: Call) -> bool:
    return call.args["query"].shape[1] > 1 and len(call.model.tokens) > 1


@state("latent", "attend")
def several_heads_attend_to_packed_rows(call: Call) -> bool:
    return several_heads_attend_to_several_tokens(call) and call.model.dtype == PACKED


@state("latent", "attend")
def a_causal_query_sees_no_token_and_another_some(call: Call) -> bool:
    return bool(call.args["causal"] and 0 < len(call.model.tokens) < len(call.args["query"]))


@state("latent", "attend")
def causal_queries_see_all_but_the_last_tokens(call: Call) -> bool:
    return bool(call.args["causal"] and 1 < len(call.args["query"]) < len(call.model.tokens))


@state("latent", "attend")
def nothing_is_attended_to(call: Call) -> bool:
    return not call.model.tokens


def note_latent(call: Call) -> None:
    if call.op == "latent.clear" and call.model.tokens:
        call.past.most[call.on] = len(call.model.tokens)


NOTES["latent"] = note_latent
