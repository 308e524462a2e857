"""The states of the `channels` cache that random call sequences should reach, because bugs depend on them."""

import numpy as np

from kvref_conformance.families.channels.model import Channels
from kvref_conformance.searching.states import NOTES, Call, refusals, state

refusals(
    "channels", "ShapeMismatch", "DtypeMismatch", "PositionOutOfRange", "CapacityExceeded", "NonFinite", "NotTruncatable",
)  # fmt: skip


def past(call: Call) -> int:
    """Returns the number of tokens after the last full residual, whose keys are quantized together."""
    return len(call.model) % int(call.model.residual)


@state("channels", "append", raising="CapacityExceeded")
def tokens_that_do_not_fit_would_fill_a_residual(call: Call) -> bool:
    return bool(0 < past(call) < call.model.residual <= past(call) + call.tokens)


@state("channels", "append")
def it_is_filled_to_the_last_token(call: Call) -> bool:
    return bool(call.tokens and len(call.model) + call.tokens == call.model.room)


@state("channels", "append")
def one_token_fills_the_residual(call: Call) -> bool:
    return bool(call.tokens == 1 and past(call) == call.model.residual - 1)


@state("channels", "append")
def several_residuals_come_at_once(call: Call) -> bool:
    return bool(call.tokens > 2 * call.model.residual)


@state("channels", "append")
def a_group_is_of_what_was_held_and_what_comes(call: Call) -> bool:
    return bool(past(call) > 0 and call.model.residual < past(call) + call.tokens)


@state("channels", "append")
def a_second_residual_is_quantized_in_a_later_call(call: Call) -> bool:
    return bool(len(call.model) >= call.model.residual <= past(call) + call.tokens)


@state("channels", "append")
def values_get_old_and_keys_are_not_full(call: Call) -> bool:
    return bool(len(call.model) >= call.model.residual and 0 < past(call) + call.tokens < call.model.residual)


@state("channels", "length")
def a_loud_channel_is_quantized_beside_a_quiet_one(call: Call) -> bool:
    model: Channels = call.model
    keys = model.keys[: len(model.quantized[0].values)]
    loudest = np.abs(keys).max(axis=(0, 1)).astype(np.float64) if len(keys) else np.zeros(1)
    return bool(0 < 20 * loudest.min() < loudest.max())


@state("channels", "append")
def tokens_follow_a_truncate_of_some(call: Call) -> bool:
    return call.model.last == "truncate" and call.tokens > 0 and len(call.model) > 0


@state("channels", "truncate")
def keys_that_are_quantized_are_taken_back(call: Call) -> bool:
    return bool(0 < call.args["length"] < len(call.model.quantized[0].values))


@state("channels", "truncate")
def values_that_are_quantized_are_in_full_again(call: Call) -> bool:
    return bool(call.model.residual < call.args["length"] < len(call.model))


@state("channels", "append")
def fewer_tokens_are_appended_after_a_clear(call: Call) -> bool:
    return not len(call.model) and 0 < call.tokens < call.past.most.get(call.on, 0)


@state("channels", "attend")
def attention_goes_over_quantized_keys_and_others(call: Call) -> bool:
    return bool(len(call.model) > call.model.residual and past(call))


@state("channels", "read")
def a_value_is_read_in_full_whose_key_is_quantized(call: Call) -> bool:
    keys, values = (len(part.values) for part in call.model.quantized)
    return any(values <= position < keys for position in call.args["positions"])


def note_channels(call: Call) -> None:
    if call.op == "channels.clear" and len(call.model):
        call.past.most[call.on] = len(call.model)


NOTES["channels"] = note_channels
