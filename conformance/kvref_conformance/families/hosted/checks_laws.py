"""LAW-20: a law in the form that applies to this family only."""

from collections.abc import Iterator

from kvref_conformance.checking.integers import Seen, Typed, the_same_in_any_type
from kvref_conformance.checking.registry import check
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.hosted.checks import block_of_tokens


@check("LAW-20", "hosted")
def blocks_and_places_are_numbers_of_any_type(subject: Subject) -> None:
    """There are more than 256 slots, so that 8-bit indices overflow."""
    tokens = list[tuple[object, object]]()

    def script(typed: Typed) -> Iterator[Seen]:
        store = typed.new("hosted", num_blocks=100, capacity=100)
        last = min(store.config["num_blocks"], store.config["capacity"]) - 1
        if not tokens:
            tokens.append(block_of_tokens(subject, store))
        yield "write of a block", typed.call(store, "write", last, *tokens[0])
        yield "to_host of the block", typed.call(store, "to_host", [last], [last])
        yield "to_device of the block", typed.call(store, "to_device", [last], [0])
        yield "read of the copy", typed.call(store, "read", 0)

    the_same_in_any_type(subject, script)
