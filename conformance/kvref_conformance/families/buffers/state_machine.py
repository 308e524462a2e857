"""The state machine of the family `buffers`."""

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvref_conformance.families.buffers.model import SIZE_CLASSES, Buffer, class_of
from kvref_conformance.fuzz.base_machine import FamilyStateMachine
from kvref_conformance.fuzz.state_registry import NOTES, ModelCall, register_error_states, state

INDEX = st.integers(0, 3)


class BuffersStateMachine(FamilyStateMachine):
    family = "buffers"

    @initialize(max_buffers=st.sampled_from((1, 2, 3, 2)))
    def new(self, max_buffers: int) -> None:
        self.make_object(max_buffers=max_buffers)
        self.pool = self.objects[0] if self.objects else None

    def buffer_at(self, index: int) -> int | None:
        """Returns a buffer: index 0 is the newest in use; released buffers follow after all buffers in use."""
        buffers = {number: each for number in self.objects if isinstance(each := self.models[number], Buffer)}
        ordered = sorted(buffers, key=lambda number: (not buffers[number].in_use, -number))
        return ordered[index % len(ordered)] if ordered else None

    def edits(self, which: int) -> dict[str, Callable[[int], Any]]:
        self.edited = self.buffer_at(which)

        def on_buffer(name: str, **args: Any) -> None:
            if self.edited is not None:
                self.call(name, self.edited, **args)

        def acquire(number: int) -> None:
            self.acquire(1024)
            self.edited = self.buffer_at(0)

        def release(number: int) -> None:
            on_buffer("release")
            self.edited = self.buffer_at(number)

        return {
            "acquire": acquire,
            "prewarm": lambda number: self.prewarm(1024, 1 + number % 2),
            "clear the pool": lambda number: self.clear(),
            "extend": lambda number: on_buffer("extend", values=self.source.rows((1 + number,), "counting")),
            "clear": lambda number: on_buffer("clear"),
            "release": release,
        }

    @precondition(lambda self: self.objects)
    @rule(size=st.sampled_from((1024, 1, 1024, 0, 1025, 1024, SIZE_CLASSES[-1], SIZE_CLASSES[-1] + 1, -1)))
    def acquire(self, size: int) -> None:
        if len(self.objects) == 6 and (buffer := self.buffer_at(-1)) is not None:
            self.objects.remove(buffer)  # stop observing it
        self.acquire_buffer(size)

    @precondition(lambda self: len(self.objects) > 1)
    @rule(which=INDEX, count=st.sampled_from((1, 3, 250, 256, 6, 0, 300)))
    def extend(self, which: int, count: int) -> None:
        self.call("extend", self.buffer_at(which), values=self.source.rows((count,), "counting"))

    extend_more = extend

    @precondition(lambda self: len(self.objects) > 1)
    @rule(which=INDEX)
    def extend_wrongly(self, which: int) -> None:
        self.call("extend", self.buffer_at(which), values=np.ones((2, 2), np.float32))

    @precondition(lambda self: len(self.objects) > 1)
    @rule(which=INDEX, count=st.sampled_from((1, 3, 250, 0)))
    def clear_buffer(self, which: int, count: int) -> None:
        self.call("clear", self.buffer_at(which))
        self.call("extend", self.buffer_at(which), values=self.source.rows((count,), "counting"))

    @precondition(lambda self: len(self.objects) > 1)
    @rule(which=INDEX, count=st.sampled_from((1, 3, 250, 0)))
    def release(self, which: int, count: int) -> None:
        """Release a buffer and acquire the next one of its class, which reuses the memory."""
        number = self.buffer_at(which)
        if number is not None:
            buffer = self.models[number]
            assert isinstance(buffer, Buffer)
            self.call("release", number)
            self.acquire(buffer.bytes)
            self.extend(0, count)

    @precondition(lambda self: len(self.objects) > 1)
    @rule(which=INDEX)
    def release_only(self, which: int) -> None:
        self.call("release", self.buffer_at(which))

    @precondition(lambda self: self.objects)
    @rule(size=st.sampled_from((1024, 1024, 4096, 1000)), count=st.sampled_from((1, 2, 3, 0, -1)))
    def prewarm(self, size: int, count: int) -> None:
        self.call("prewarm", self.pool, size=size, count=count)

    @precondition(lambda self: self.objects)
    @rule()
    def clear(self) -> None:
        self.call("clear", self.pool)


# The states of the buffer pool that random call sequences should reach, because bugs depend on them.

register_error_states(
    "buffers", "PositionOutOfRange", "BufferTooLarge", "ConfigError", "ShapeMismatch", "CapacityExceeded", "BufferReleased",
)  # fmt: skip


def number_of_values(call: ModelCall) -> int:
    """Returns the number of values in a buffer."""
    return sum(len(part) for part in call.model.written)


def buffers_in_use(call: ModelCall, size: int) -> list[int]:
    """Returns the buffers in use of a size class."""
    return [number for number, each in call.models.items() if isinstance(each, Buffer) and each.in_use and each.bytes == size]


@state("buffers", "buffer.extend")
def a_buffer_contains_less_than_its_memory_did_before(call: ModelCall) -> bool:
    before = call.history.buffer_sizes.get(call.model.bytes, 0)
    return call.on in call.history.reused_buffers and 0 < number_of_values(call) + call.tokens < before


@state("buffers", "acquire")
def two_buffers_of_a_class_are_in_use(call: ModelCall) -> bool:
    return len(buffers_in_use(call, class_of(call.args["num_bytes"]))) > 0


@state("buffers", "buffer.release")
def a_buffer_is_released_to_a_full_free_list(call: ModelCall) -> bool:
    return bool(call.model.in_use and call.model.pool.free[call.model.bytes] == call.model.pool.most)


@state("buffers", "buffer.release")
def a_buffer_is_released_twice(call: ModelCall) -> bool:
    return not call.model.in_use


@state("buffers", "buffer.release")
def a_buffer_is_released_twice_while_another_has_its_memory(call: ModelCall) -> bool:
    return not call.model.in_use and not call.history.reused_buffers.isdisjoint(buffers_in_use(call, call.model.bytes))


@state("buffers", "buffer.extend", raising="BufferReleased")
def a_released_buffer_is_written_to(call: ModelCall) -> bool:
    return True


@state("buffers", "buffer.extend")
def a_buffer_with_values_is_extended(call: ModelCall) -> bool:
    return bool(number_of_values(call) and call.tokens)


@state("buffers", "buffer.extend")
def a_buffer_is_filled_to_the_last_value(call: ModelCall) -> bool:
    return bool(call.tokens and number_of_values(call) + call.tokens == call.model.bytes // 4)


@state("buffers", "buffer.extend", raising="CapacityExceeded")
def an_extend_exceeds_the_room_of_a_buffer_with_values(call: ModelCall) -> bool:
    return bool(0 < number_of_values(call) < call.model.bytes // 4)


@state("buffers", "buffer.extend")
def a_cleared_buffer_is_extended_with_fewer_values(call: ModelCall) -> bool:
    return 0 < number_of_values(call) + call.tokens < call.history.max_tokens.get(call.on, 0)


@state("buffers", "clear")
def a_pool_with_free_buffers_is_cleared(call: ModelCall) -> bool:
    return any(call.model.free.values())


@state("buffers", "buffer.release")
def a_buffer_is_released_after_its_pool_was_cleared(call: ModelCall) -> bool:
    return call.model.in_use and "a pool with free buffers is cleared" in call.history.reached


@state("buffers", "prewarm")
def prewarm_stops_at_max_buffers(call: ModelCall) -> bool:
    return bool(
        0 < call.model.free[call.args["size"]] < call.model.most < call.model.free[call.args["size"]] + call.args["count"]
    )


@state("buffers", "acquire")
def acquire_returns_a_free_buffer(call: ModelCall) -> bool:
    return bool(call.model.free[class_of(call.args["num_bytes"])])


def note_buffers(call: ModelCall) -> None:
    if call.error_kind:
        return
    if call.op == "buffers.acquire" and call.model.free[class_of(call.args["num_bytes"])] and call.history.buffer_sizes:
        call.history.reused_buffers.add(call.id)
    elif call.op == "buffer.release" and call.model.in_use:
        size = call.model.bytes
        call.history.buffer_sizes[size] = max(number_of_values(call), call.history.buffer_sizes.get(size, 0))
    elif call.op == "buffer.clear":
        call.history.max_tokens[call.on] = number_of_values(call)


NOTES["buffers"] = note_buffers
