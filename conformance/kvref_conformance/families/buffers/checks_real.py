"""Checks of LAW-18: hundreds of buffers, filled to their last value."""

from kvref_conformance.arrays import NDArray
from kvref_conformance.checking.content import KEYS, content
from kvref_conformance.checking.expect import equal, same
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import new
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.buffers.model import CLASSES


def values(number: int, start: int, stop: int) -> NDArray:
    """Returns float32 [stop - start]: the values that belong in buffer `number` at [start, stop)."""
    return content(number, 0, range(start, stop), 1, 1, KEYS).reshape(-1)


@check("LAW-18", "buffers")
def buffers_of_every_class_are_filled_to_their_last_value(subject: Subject) -> None:
    pool = new(subject, "buffers")
    held = [pool.acquire(size) for size in (*CLASSES, CLASSES[-1] - 3)]
    for number, buffer in enumerate(held):
        room = buffer.capacity
        for start, stop in ((0, room - 1), (room - 1, room)):
            buffer.extend(values(number, start, stop))
    for number, buffer in enumerate(held):
        same(buffer.values(), values(number, 0, buffer.capacity), f"values of a buffer of {buffer.size} bytes")


@check("LAW-18", "buffers")
def hundreds_of_buffers_are_held_at_once(subject: Subject) -> None:
    pool = new(subject, "buffers", max_buffers=300)
    held = {number: pool.acquire(1024 if number % 3 else 4096) for number in range(400)}
    for number, buffer in held.items():
        buffer.extend(values(number, 0, 70))
    for number in range(0, 400, 2):
        held.pop(number).release()
    kept = min(200, pool.config["max_buffers"])
    for number in range(400, 700):
        held[number] = pool.acquire(1000)
        held[number].extend(values(number, 0, 33 + number % 90))
    for number, buffer in held.items():
        same(buffer.values(), values(number, 0, 70 if number < 400 else 33 + number % 90), f"values of buffer {number}")
    stats = pool.stats()
    equal(stats.returns, 200, "returns in the statistics")
    equal(stats.hits <= kept, True, f"whether there are at most {kept} hits, one per kept buffer")
