"""The states of the quantized cache that random call sequences should reach, because bugs depend on them."""

import numpy as np

from kvref_conformance.searching.states import NOTES, Call, refusals, state

refusals(
    "quantized", "LayerOutOfRange", "PositionOutOfRange", "HeadOutOfRange", "ShapeMismatch", "DtypeMismatch", "CapacityExceeded",
    "NonFinite",
)  # fmt: skip


def fill(call: Call) -> list[int]:
    """Returns the length of each layer."""
    return [len(tokens) for tokens in call.model.tokens]


@state("quantized", "length")
def a_layer_is_full_and_another_is_not(call: Call) -> bool:
    return bool(min(fill(call)) < max(fill(call)) == call.model.room)


@state("quantized", "append_step", raising="CapacityExceeded")
def a_step_meets_a_full_layer_and_one_that_is_not(call: Call) -> bool:
    return bool(min(fill(call)) < call.model.room)


@state("quantized", "append_step")
def a_step_goes_to_layers_of_different_length(call: Call) -> bool:
    return len(set(fill(call))) > 1


@state("quantized", "length")
def every_layer_is_full(call: Call) -> bool:
    return len(fill(call)) > 1 and min(fill(call)) == call.model.room


@state("quantized", "clear")
def layers_of_different_length_are_cleared(call: Call) -> bool:
    return len(set(fill(call))) > 1


@state("quantized", "length")
def fewer_tokens_follow_a_clear(call: Call) -> bool:
    return 0 < sum(fill(call)) < call.past.most.get(call.on, 0)


@state("quantized", "length")
def every_layer_has_tokens_after_a_clear(call: Call) -> bool:
    return call.on in call.past.most and len(fill(call)) > 1 and min(fill(call)) > 0


@state("quantized", "length")
def a_quiet_token_lies_beside_a_loud_one(call: Call) -> bool:
    for tokens in call.model.tokens:
        loudest = [float(np.abs(token[0].values).max()) for token in tokens]
        if loudest and 0 < 50 * min(loudest) < max(loudest):
            return True
    return False


@state("quantized", "truncate")
def layers_of_different_length_are_truncated(call: Call) -> bool:
    return len(set(fill(call))) > 1 and call.args["length"] > 0


@state("quantized", "truncate")
def every_layer_loses_some_tokens_and_keeps_some(call: Call) -> bool:
    return bool(0 < call.args["length"] < min(fill(call)))


@state("quantized", "append", "append_step")
def tokens_follow_a_truncate_of_some(call: Call) -> bool:
    return call.model.last == "truncate" and call.tokens > 0 and min(fill(call)) > 0


@state("quantized", "read_token")
def a_token_is_read_that_is_neither_the_first_nor_the_last(call: Call) -> bool:
    return bool(0 < call.args["position"] < fill(call)[call.args["layer"]] - 1)


@state("quantized", "read_head")
def a_head_is_read_that_is_not_the_first(call: Call) -> bool:
    return bool(call.args["head"] > 0)


@state("quantized", "read_token")
def a_token_of_a_layer_is_read_that_is_not_the_first(call: Call) -> bool:
    return bool(call.args["layer"] > 0)


@state("quantized", "attend")
def attention_goes_over_several_tokens(call: Call) -> bool:
    return bool(fill(call)[call.args["layer"]] > 1)


def note_quantized(call: Call) -> None:
    if call.op == "quantized.clear" and any(fill(call)):
        call.past.most[call.on] = sum(fill(call))


NOTES["quantized"] = note_quantized
