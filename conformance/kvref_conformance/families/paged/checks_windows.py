"""Checks of WIN-09: `release_before` frees blocks before a window and moves no token."""

from functools import partial

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.checking.attending import even, exact, queries
from kvref_conformance.checking.content import Written, belongs, pair_of_content
from kvref_conformance.checking.expect import equal, pair, raises, within
from kvref_conformance.checking.real import affordable
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import blocks_of, pair_of_tokens
from kvref_conformance.conversation.handle import Handle
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.paged.counting import (
    NO_BLOCK,
    in_use,
    layers_of,
    need_tokens,
    offered,
    put,
    stay,
    tables_alone,
    with_room,
)


class Sliding:
    """A sequence whose first blocks are released, with every token that was written to it, per layer."""

    def __init__(self, subject: Subject, cache: Handle, entries: int, more: int = 1) -> None:
        """Creates a sequence with `entries` full blocks and `more` further tokens."""
        self.subject, self.cache = subject, cache
        self.size: int = cache.config["block_size"]
        self.layers, self.released = layers_of(cache), 0
        self.sequence: int = cache.create()
        self.lie: list[list[int]] = []  # its tables at the last look
        self.tokens: list[tuple[NDArray, NDArray]] = [pair_of_tokens(subject, 0) for _ in self.layers]
        self.write(entries * self.size + more)

    def __len__(self) -> int:
        return len(self.tokens[0][0])

    def write(self, count: int) -> None:
        """Writes `count` more tokens in each layer."""
        for layer in self.layers:
            keys, values = pair_of_tokens(self.subject, count)
            put(self.subject, self.cache, self.sequence, layer, len(self.tokens[layer][0]), keys, values)
            held = self.tokens[layer]
            self.tokens[layer] = np.concatenate([held[0], keys]), np.concatenate([held[1], values])

    def release(self, position: int) -> None:
        self.cache.release_before(self.sequence, position)
        self.released = max(self.released, position // self.size)

    @property
    def entries(self) -> int:
        """The number of table entries that still have a block."""
        return -(-len(self) // self.size) - self.released

    def tables(self) -> list[list[int]]:
        """Returns the block table of each layer. Raises NotOffered."""
        return [blocks_of(self.cache, self.sequence, layer) for layer in self.layers]

    def look(self, when: str) -> None:
        """Raises Broken unless the remaining tokens read as before at their positions."""
        if tables_alone(self.subject):
            self.lie = stay(self.subject, self.cache, self.sequence, self.lie, self.released, when)
            return
        left = range(self.released * self.size, len(self))
        for layer in self.layers:
            equal(self.cache.length(self.sequence, layer), len(self), f"length of layer {layer} {when}")
            wanted = self.tokens[layer][0][left.start :], self.tokens[layer][1][left.start :]
            pair(
                self.cache.read(self.sequence, layer, list(left)),
                wanted,
                f"positions from {left.start} on, layer {layer}, {when}",
            )
            if left.start:
                for gone in (left.start - 1, 0):
                    with raises("PositionOutOfRange"):
                        self.cache.read(self.sequence, layer, [gone])


@check("WIN-09abcd", "paged")
def whole_blocks_below_a_position_are_given_back(subject: Subject) -> None:
    subject.need(sequences=2)
    size = subject.size("block_size", 3)
    for position in dict.fromkeys((0, 1, size - 1, size, size + 1, 2 * size, 4 * size, 4 * size + 1)):
        cache = with_room(subject, 6)
        run = Sliding(subject, cache, 4)
        before = list[list[int]]()
        offered(partial(lambda run, found: found.extend(run.tables()), run, before))
        run.release(position)
        when = f"after release_before({position}) of {len(run)} tokens in blocks of {size}"
        in_use(subject, cache, {run.sequence: run.entries}, when)
        for layer, blocks in enumerate(before):
            want = [NO_BLOCK] * run.released + blocks[run.released :]
            equal(run.tables()[layer], want, f"block table of layer {layer} {when}")
        run.look(when)


@check("WIN-09acd", "paged")
def a_window_slides_over_a_sequence(subject: Subject) -> None:
    """Released blocks can be allocated to the other sequence at once."""
    subject.need(sequences=2)
    cache = with_room(subject, 12)
    run, other = Sliding(subject, cache, 1), Sliding(subject, cache, 1)
    window = run.size + 1
    for step in range(4 * run.size):
        for each in (run, other):
            each.write(1)
            each.release(max(0, len(each) - window + 1))
        run.look(f"after {step + 1} steps of a window of {window}")
        other.look(f"after {step + 1} steps of a window of {window}, as the second of two sequences")
    in_use(subject, cache, {each.sequence: each.entries for each in (run, other)}, "after the steps of two windowed sequences")
    for each in (run, other):
        cache.drop(each.sequence)
    in_use(subject, cache, {}, "after drop of both")
    Sliding(subject, cache, 2).look("of a sequence created after two with released blocks were dropped")


@check("WIN-09ac", "paged")
def what_was_given_back_is_given_back_once(subject: Subject) -> None:
    subject.need(sequences=2)
    cache = with_room(subject, 6)
    run = Sliding(subject, cache, 3)
    for position in (2 * run.size, 2 * run.size, run.size, 0, 2 * run.size + 1):
        run.release(position)
        in_use(subject, cache, {run.sequence: run.entries}, f"after release_before({position}), partly repeated")
        run.look(f"after release_before({position}), partly repeated")
    cache.drop(run.sequence)
    in_use(subject, cache, {}, "after drop of a sequence with released blocks")


@check("WIN-09ac", "paged")
def a_sharer_keeps_what_another_gives_back(subject: Subject) -> None:
    need_tokens(subject)
    subject.need(sequences=3)
    cache = with_room(subject, 8)
    run = Sliding(subject, cache, 3)
    child = Sliding(subject, cache, 0, 0)
    cache.drop(child.sequence)
    child.sequence, child.tokens = cache.fork(run.sequence), list(run.tokens)
    run.release(2 * run.size)
    child.look("after release_before on its parent")
    run.look("after release_before of shared blocks")
    late = Sliding(subject, cache, 0, 0)
    cache.drop(late.sequence)
    late.sequence, late.tokens, late.released = cache.fork(run.sequence), list(run.tokens), run.released
    late.look("of a fork of a sequence with released blocks")
    child.release(run.size)
    child.look("after release_before of a block that no other sequence shares")
    for each in (run, late, child):
        cache.drop(each.sequence)
    in_use(subject, cache, {}, "after drop of all sharers")


@check("WIN-09cd", "paged")
def nothing_can_be_done_where_blocks_were_given_back(subject: Subject) -> None:
    cache = with_room(subject, 6)
    run = Sliding(subject, cache, 3)
    run.release(2 * run.size)
    keys, values = pair_of_tokens(subject, 1)
    for position in (2 * run.size - 1, 0):
        with raises("PositionOutOfRange"):
            cache.write(run.sequence, 0, position, keys, values)
        offered(partial(_refused_slots, cache, run.sequence, position))
        if position:
            offered(partial(_refused_cut, cache, run.sequence, position))
        run.look("after rejected calls at released positions")
    run.write(2 * run.size)
    run.look("after release_before and writes")
    offered(partial(_begun_anew, subject, cache, run.sequence))


def _begun_anew(subject: Subject, cache: Handle, sequence: int) -> None:
    cache.truncate(sequence, 0)
    equal(cache.length(sequence, 0), 0, "length after truncate(0)")
    tokens = pair_of_tokens(subject, 1)
    cache.write(sequence, 0, 0, *tokens)
    pair(cache.gather(sequence, 0), tokens, "a token written after truncate(0)")


def _refused_slots(cache: Handle, sequence: int, position: int) -> None:
    with raises("PositionOutOfRange"):
        cache.slot_mapping(sequence, 0, position, 1)


def _refused_cut(cache: Handle, sequence: int, length: int) -> None:
    with raises("NotTruncatable"):
        cache.truncate(sequence, length)


@check("WIN-09e", "paged")
def what_goes_over_all_tokens_goes_over_those_that_are_left(subject: Subject) -> None:
    cache = with_room(subject, 6)
    run = Sliding(subject, cache, 3)
    run.release(run.size + 1)
    left = run.tokens[0][0][run.size :], run.tokens[0][1][run.size :]
    gathered = offered(lambda: pair(cache.gather(run.sequence, 0), left, "the remaining tokens by gather"))
    query = queries(subject, 1)
    want, bound = exact(subject, query, *left, scale=even(subject))
    attended = offered(
        lambda: within(cache.attend(run.sequence, 0, query, even(subject)), want, bound, "attention over the remaining tokens")
    )
    if not (gathered or attended):
        cache.gather(run.sequence, 0)  # raises NotOffered


@check("WIN-09f", "paged")
def more_than_there_is_cannot_be_given_back(subject: Subject) -> None:
    need_tokens(subject)
    cache = with_room(subject, 6)
    run = Sliding(subject, cache, 2)
    for position in subject.integers(len(run) + 1, len(run) + run.size, -1):
        with raises("PositionOutOfRange"):
            cache.release_before(run.sequence, position)
        run.look(f"after a rejected release_before({position})")
    cache.drop(run.sequence)
    with raises("SequenceNotFound"):
        cache.release_before(run.sequence, 0)


@check("LAW-18", "paged")
def windows_slide_over_long_sequences(subject: Subject) -> None:
    sliding(subject, 1, 64, 128, (1, 127, 300, 1, 16, 65, 1, 1, 257))


@check("LAW-18", "paged", real=True)
def windows_of_models_slide_over_long_sequences(subject: Subject) -> None:
    sliding(subject, 8, 128, 4096, (1, 4095, 2048, 1, 16, 65, 1, 1, 8193, 1))


def sliding(subject: Subject, heads: int, dim: int, window: int, pieces: tuple[int, ...]) -> None:
    """Checks one sequence in a pool with room for its window and its longest step only."""
    pieces = tuple(affordable(subject, each, len(pieces)) for each in pieces)
    size = subject.size("block_size", 16)
    entries = -(-(window + max(pieces)) // size) + 1
    cache = with_room(subject, entries, num_layers=1, num_kv_heads=heads, head_dim=dim, block_size=size)
    written = Written(cache.config["num_kv_heads"], cache.config["head_dim"])
    sequence, layers, at = cache.create(), layers_of(cache), 0
    for count in pieces:
        for layer in layers:
            cache.write(sequence, layer, at, *pair_of_content(0, layer, range(at, at + count), written.heads, written.dim))
            written.up_to(0, layer, at + count)
        at += count
        below = max(0, at - window + 1)
        cache.release_before(sequence, below)
        left = range(below // size * size, at)
        for layer in layers:
            belongs(cache.read(sequence, layer, list(left)), 0, layer, left, written)
    equal(cache.length(sequence, 0), at, "length of a sequence with released blocks")
