"""States of a host store in which bugs are likely."""

from collections.abc import Sequence

from kvref_conformance.families.offload.model import Offload
from kvref_conformance.searching.states import NOTES, Call, refusals, state

refusals("offload", "OutOfBlocks", "KeyNotFound")


def evicting(call: Call) -> list[int]:
    """The keys that a call evicted."""
    return list(call.ok[1])


def passed_over(call: Call) -> list[int]:
    """Keys used less recently than an evicted key, which an LRU order would have evicted before it."""
    used: list[int] = call.model.used
    return used[: max((used.index(key) for key in evicting(call)), default=0)]


def known(call: Call) -> tuple[Offload, Sequence[int]]:
    return call.model, call.args["keys"]


@state("offload", "prepare_store")
def a_block_is_evicted(call: Call) -> bool:
    return bool(evicting(call))


@state("offload", "prepare_store")
def what_is_being_loaded_is_passed_over(call: Call) -> bool:
    return any(call.model.loads[key] for key in passed_over(call))


@state("offload", "prepare_store")
def what_is_being_stored_is_passed_over(call: Call) -> bool:
    return any(key in call.model.coming for key in passed_over(call))


@state("offload", "prepare_store")
def what_the_call_names_itself_is_passed_over(call: Call) -> bool:
    return any(key in call.args["keys"] for key in passed_over(call))


@state("offload", "prepare_store")
def a_block_is_evicted_that_was_loaded_before(call: Call) -> bool:
    return any(key in call.past.given_back for key in evicting(call))


@state("offload", "prepare_store")
def some_are_there_and_some_are_new(call: Call) -> bool:
    return 0 < len(call.ok[0]) < len(call.args["keys"])


@state("offload", "prepare_store", raising="OutOfBlocks")
def there_would_be_room_if_nothing_were_under_way(call: Call) -> bool:
    model, keys = known(call)
    new = sum(key not in model.used for key in set(keys))
    return new <= model.free + sum(key not in keys for key in model.used)


@state("offload", "prepare_load", raising="KeyNotFound")
def the_last_of_several_cannot_be_loaded(call: Call) -> bool:
    model, keys = known(call)
    return len(keys) > 1 and keys[0] in model.ready


@state("offload", "prepare_load", raising="KeyNotFound")
def what_is_half_stored_is_to_be_loaded(call: Call) -> bool:
    model, keys = known(call)
    return any(key in model.coming for key in keys)


@state("offload", "prepare_load")
def a_block_is_loaded_twice_at_a_time(call: Call) -> bool:
    model, keys = known(call)
    return any(model.loads[key] for key in keys)


@state("offload", "complete_load")
def one_of_two_loads_is_over(call: Call) -> bool:
    model, keys = known(call)
    return any(model.loads[key] > 1 for key in keys)


@state("offload", "complete_store")
def a_store_fails(call: Call) -> bool:
    return not call.args.get("success", True) and any(key in call.model.coming for key in call.args["keys"])


@state("offload", "complete_store")
def what_failed_is_stored_again(call: Call) -> bool:
    return call.args.get("success", True) and any(key in call.past.used_again for key in call.args["keys"])


@state("offload", "touch")
def what_was_used_longest_ago_is_touched(call: Call) -> bool:
    model, keys = known(call)
    return len(model.used) > 1 and model.used[0] in keys


def note_offload(call: Call) -> None:
    if call.raised:
        return
    if call.op == "offload.complete_load":
        call.past.given_back.update(call.args["keys"])
    elif call.op == "offload.complete_store" and not call.args.get("success", True):
        call.past.used_again.update(call.args["keys"])


NOTES["offload"] = note_offload
