"""State machine of the family `hosted`: random call sequences."""

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvref_conformance.families.hosted.model import Block, Hosted
from kvref_conformance.fuzz.base_machine import LAST_INDEX, FamilyStateMachine, clip_index, make_pair
from kvref_conformance.fuzz.state_registry import ModelCall, register_error_states, state
from kvref_conformance.oracle.formats import PLAIN_FORMATS, SYMMETRIC_FORMATS, group_of

SOME_GROUPS = ("q8_0", "q4_1", "mxfp4", "nvfp4", "int4_g32_float16", "uint8_g32_bfloat16")
MANY = st.sampled_from((0, 0, 1, 2, 3, 1, 2, 0, 1, LAST_INDEX))
ORDER = st.permutations(range(4))
COUNT = st.sampled_from((1, 2, 1, 3, 4, 0))
KIND = st.sampled_from(("counting", "uneven", "uneven", "zeros", "ties"))


class HostedStateMachine(FamilyStateMachine):
    family = "hosted"

    @initialize(
        num_blocks=st.sampled_from((3, 2, 4, 1)), block_size=st.sampled_from((2, 3, 1)), heads=st.integers(1, 2),
        dim=st.sampled_from((1, 3, 2)), format=st.sampled_from((*PLAIN_FORMATS, *SYMMETRIC_FORMATS, *SOME_GROUPS)),
        capacity=st.sampled_from((2, 3, 1, 4)),
    )  # fmt: skip
    def new(self, num_blocks: int, block_size: int, heads: int, dim: int, format: str, capacity: int) -> None:
        group = group_of(self.format_for(self.family, "format", format) or "")
        sizes = {"num_blocks": num_blocks, "block_size": block_size, "num_kv_heads": heads, "head_dim": dim * group}
        self.make_object(**sizes, format=format, capacity=capacity)

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.config["block_size"], self.config["num_kv_heads"], self.config["head_dim"]

    def edits(self, which: int) -> dict[str, Callable[[int], Any]]:
        self.edited = self.objects[0]

        def copy(number: int, name: str) -> None:
            block, place = [number % self.config["num_blocks"]], [number // 2 % self.config["capacity"]]
            self.call(name, self.edited, blocks=block, places=place)

        return {
            "write": lambda number: self.write(number % self.config["num_blocks"], "uneven"),
            "to_host": lambda number: copy(number, "to_host"),
            "to_device": lambda number: copy(number, "to_device"),
        }

    @precondition(lambda self: self.objects)
    @rule(block=MANY, kind=KIND)
    def write(self, block: int, kind: str) -> None:
        keys, values = make_pair(self.source, self.shape, kind)
        self.call("write", self.objects[0], block=clip_index(block, self.config["num_blocks"]), keys=keys, values=values)

    write_more = write

    @precondition(lambda self: self.objects)
    @rule(wrong=st.integers(0, 5), side=st.integers(0, 2))
    def write_wrongly(self, wrong: int, side: int) -> None:
        keys, values = self.source.wrong_pair(self.shape, wrong, side)
        self.call("write", self.objects[0], block=0, keys=keys, values=values)

    def pick(self, order: list[int], count: int, of: str) -> list[int]:
        """At most `count` distinct indices of blocks or of host blocks, fewer if fewer exist."""
        return [number for number in order if number < self.config[of]][:count]

    @precondition(lambda self: self.objects)
    @rule(one=ORDER, two=ORDER, count=COUNT, out=st.booleans())
    def copy(self, one: list[int], two: list[int], count: int, out: bool) -> None:
        blocks, places = self.pick(one, count, "num_blocks"), self.pick(two, count, "capacity")
        count = min(len(blocks), len(places))
        name = "to_host" if out else "to_device"
        self.call(name, self.objects[0], blocks=blocks[:count], places=places[:count])

    copy_more = copy

    @precondition(lambda self: self.objects)
    @rule(one=ORDER, two=ORDER, kind=KIND)
    def away_and_back(self, one: list[int], two: list[int], kind: str) -> None:
        """Copy a block to the host, overwrite it, and copy it back to another block."""
        block, place, other = self.pick(one, 1, "num_blocks"), self.pick(two, 1, "capacity"), self.pick(two, 1, "num_blocks")
        self.write(block[0], kind)
        self.call("to_host", self.objects[0], blocks=block, places=place)
        self.write(block[0], kind)
        self.call("to_device", self.objects[0], places=place, blocks=other)

    @precondition(lambda self: self.objects)
    @rule(wrong=st.integers(0, 3), out=st.booleans())
    def copy_wrongly(self, wrong: int, out: bool) -> None:
        blocks, places = self.config["num_blocks"], self.config["capacity"]
        numbers = (([0, blocks], [0, 1]), ([0, 0], [0, places]), ([0], [0, 1]), ([0, 0], [0]))[wrong]
        if not out and wrong == 0:
            numbers = [0, blocks], [0, 0]
        name = "to_host" if out else "to_device"
        self.call(name, self.objects[0], blocks=numbers[0], places=numbers[1])


# States of blocks and host blocks in which bugs are likely.

register_error_states("hosted", "SlotOutOfRange", "ShapeMismatch", "DtypeMismatch")


def sources(call: ModelCall) -> list[Block | None]:
    """The blocks that a call copies."""
    model: Hosted = call.model
    if call.op == "hosted.to_host":
        return [model.blocks[number] for number in call.args["blocks"]]
    return [model.places[number] for number in call.args["places"]]


@state("hosted", "to_host")
def to_host_overwrites_a_place(call: ModelCall) -> bool:
    return any(call.model.places[place] and block for place, block in zip(call.args["places"], sources(call), strict=True))


@state("hosted", "to_device")
def to_device_overwrites_another_block(call: ModelCall) -> bool:
    model: Hosted = call.model
    pairs = zip(call.args["blocks"], sources(call), strict=True)
    return any(held and model.blocks[block] is not held and model.blocks[block] for block, held in pairs)


@state("hosted", "to_device")
def to_device_copies_a_block_that_is_nowhere_else(call: ModelCall) -> bool:
    return any(held and all(held is not block for block in call.model.blocks) for held in sources(call))


@state("hosted", "to_host", "to_device")
def several_blocks_are_copied_in_another_order(call: ModelCall) -> bool:
    places, blocks = call.args["places"], call.args["blocks"]
    return len(places) > 1 and all(sources(call)) and sorted(blocks) != blocks and sorted(places) == places


@state("hosted", "write")
def a_block_is_overwritten_that_is_on_the_host(call: ModelCall) -> bool:
    held = call.model.blocks[call.args["block"]]
    return held is not None and any(held is place for place in call.model.places)
