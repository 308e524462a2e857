"""The states of the buffer pool that random call sequences should reach, because bugs depend on them."""

from kvref_conformance.families.buffers.model import Buffer, class_of
from kvref_conformance.searching.states import NOTES, Call, refusals, state

refusals(
    "buffers", "PositionOutOfRange", "BufferTooLarge", "ConfigError", "ShapeMismatch", "CapacityExceeded", "BufferReleased",
)  # fmt: skip


def filled(call: Call) -> int:
    """Returns the number of values in a buffer."""
    return sum(len(part) for part in call.model.written)


def held_of(call: Call, size: int) -> list[int]:
    """Returns the buffers in use of a size class."""
    return [number for number, each in call.models.items() if isinstance(each, Buffer) and each.held and each.bytes == size]


@state("buffers", "buffer.extend")
def a_buffer_holds_less_than_its_memory_did_before(call: Call) -> bool:
    before = call.past.buffers.get(call.model.bytes, 0)
    return call.on in call.past.used_again and 0 < filled(call) + call.tokens < before


@state("buffers", "acquire")
def two_buffers_of_a_class_are_in_use(call: Call) -> bool:
    return len(held_of(call, class_of(call.args["num_bytes"]))) > 0


@state("buffers", "buffer.release")
def a_released_buffer_meets_a_full_free_list(call: Call) -> bool:
    return bool(call.model.held and call.model.pool.free[call.model.bytes] == call.model.pool.most)


@state("buffers", "buffer.release")
def a_buffer_is_released_twice(call: Call) -> bool:
    return not call.model.held


@state("buffers", "buffer.release")
def a_buffer_is_released_twice_while_another_has_its_memory(call: Call) -> bool:
    return not call.model.held and not call.past.used_again.isdisjoint(held_of(call, call.model.bytes))


@state("buffers", "buffer.extend", raising="BufferReleased")
def a_released_buffer_is_written_to(call: Call) -> bool:
    return True


@state("buffers", "buffer.extend")
def a_buffer_that_has_values_gets_more(call: Call) -> bool:
    return bool(filled(call) and call.tokens)


@state("buffers", "buffer.extend")
def a_buffer_is_filled_to_the_last_value(call: Call) -> bool:
    return bool(call.tokens and filled(call) + call.tokens == call.model.bytes // 4)


@state("buffers", "buffer.extend", raising="CapacityExceeded")
def a_buffer_that_has_values_cannot_take_all_that_come(call: Call) -> bool:
    return bool(0 < filled(call) < call.model.bytes // 4)


@state("buffers", "buffer.extend")
def a_cleared_buffer_gets_fewer_values(call: Call) -> bool:
    return 0 < filled(call) + call.tokens < call.past.most.get(call.on, 0)


@state("buffers", "clear")
def a_pool_is_cleared_that_has_free_buffers(call: Call) -> bool:
    return any(call.model.free.values())


@state("buffers", "buffer.release")
def a_buffer_is_released_after_its_pool_was_cleared(call: Call) -> bool:
    return call.model.held and "a pool is cleared that has free buffers" in call.past.met


@state("buffers", "prewarm")
def prewarming_stops_at_the_most_there_may_be(call: Call) -> bool:
    return bool(
        0 < call.model.free[call.args["size"]] < call.model.most < call.model.free[call.args["size"]] + call.args["count"]
    )


@state("buffers", "acquire")
def a_free_buffer_is_served(call: Call) -> bool:
    return bool(call.model.free[class_of(call.args["num_bytes"])])


def note_buffers(call: Call) -> None:
    if call.raised:
        return
    if call.op == "buffers.acquire" and call.model.free[class_of(call.args["num_bytes"])] and call.past.buffers:
        call.past.used_again.add(call.id)
    elif call.op == "buffer.release" and call.model.held:
        size = call.model.bytes
        call.past.buffers[size] = max(filled(call), call.past.buffers.get(size, 0))
    elif call.op == "buffer.clear":
        call.past.most[call.on] = filled(call)


NOTES["buffers"] = note_buffers
