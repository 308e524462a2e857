"""Checks of PAGED: appending to and reading from several sequences at once."""

from typing import Any

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.checking.expect import equal, pair, raises, true
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import blocks_of, pair_of_tokens
from kvref_conformance.conversation.handle import Handle
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.paged.checks import Pair, joined
from kvref_conformance.families.paged.counting import in_use, layers_of, room, to_be_filled, with_room
from kvref_conformance.outcome import Declined


def put(cache: Handle, sequence: int, layer: int, length: int, keys: NDArray, values: NDArray) -> None:
    """Writes tokens at the end of a sequence, or appends them one at a time if there is no write operation."""
    try:
        cache.write(sequence, layer, length, keys, values)
    except Declined:
        for row in range(len(keys)):
            cache.append([sequence], layer, keys[row : row + 1], values[row : row + 1])


def several(subject: Subject, **config: Any) -> tuple[Handle, list[int], list[Pair]]:
    """Returns a cache with sequences of 3, 0 and 5 tokens per layer (fewer if its limits say so), and the tokens of each."""
    cache = with_room(subject, 6 + 40 // subject.size("block_size", 3), **config)
    tokens = [pair_of_tokens(subject, count) for count in (3, 0, 5)[-subject.size("sequences", 3) :]]
    sequences = [cache.create() for _ in tokens]
    for sequence, (keys, values) in zip(sequences, tokens, strict=True):
        for layer in layers_of(cache):
            put(cache, sequence, layer, 0, keys, values)
    return cache, sequences, tokens


def orders(sequences: list[int], *wanted: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Returns the wanted batches whose sequences all exist."""
    return [order for order in wanted if max(order, default=0) < len(sequences)]


def step_of(subject: Subject, cache: Handle, count: int) -> Pair:
    """Returns keys and values [num_layers, count, num_kv_heads, head_dim]."""
    keys, values = (np.stack(each) for each in zip(*(pair_of_tokens(subject, count) for _ in layers_of(cache)), strict=True))
    return keys, values


@check("PAGED-16a", "paged")
def a_batch_is_appended_one_by_one(subject: Subject) -> None:
    cache, sequences, tokens = several(subject)
    before = [len(keys) for keys, _ in tokens]
    for order in orders(sequences, (2, 0, 1), (1, 2), (0,), (), (0, 1, 0), (0, 0)):
        keys, values = pair_of_tokens(subject, len(order))
        cache.append([sequences[i] for i in order], 0, keys, values)
        for row, i in enumerate(order):
            tokens[i] = joined(tokens[i], (keys[row : row + 1], values[row : row + 1]))
        for i, sequence in enumerate(sequences):
            pair(cache.gather(sequence, 0), tokens[i], f"sequence {i} after an append to {order}")
            for layer in layers_of(cache)[1:]:
                equal(cache.length(sequence, layer), before[i], f"length of layer {layer}, to which nothing was appended")


@check("PAGED-16a", "paged")
def a_batch_goes_to_the_sequences_it_names(subject: Subject) -> None:
    subject.need(sequences=2)
    cache, (gone, *others), (_, *tokens) = several(subject)
    layer = layers_of(cache)[-1]
    cache.drop(gone)
    last = cache.create()
    keys, values = pair_of_tokens(subject, 2)
    cache.append([last, others[-1]], layer, keys, values)
    pair(cache.gather(last, layer), (keys[:1], values[:1]), "a sequence created after another was dropped")
    pair(cache.gather(others[-1], layer), joined(tokens[-1], (keys[1:], values[1:])), "another sequence of the batch")
    for other in others[:-1]:
        equal(cache.length(other, layer), 0, "length of a sequence that is not in the batch")


@check("PAGED-16b", "paged")
def a_step_is_appended_in_every_layer(subject: Subject) -> None:
    cache, sequences, tokens = several(subject)
    more = pair_of_tokens(subject, 1)
    put(cache, sequences[-1], 0, 5, *more)  # layer 0 has more tokens than the other layers
    named = list(range(len(sequences)))[::-1][:2]
    keys, values = step_of(subject, cache, len(named))
    cache.append_step([sequences[i] for i in named], keys, values)
    for layer in layers_of(cache):
        before = [*tokens[:-1], joined(tokens[-1], more) if layer == 0 else tokens[-1]]
        for row, i in enumerate(named):
            want = joined(before[i], (keys[layer, row : row + 1], values[layer, row : row + 1]))
            pair(cache.gather(sequences[i], layer), want, f"layer {layer} of sequence {i}")
    for sequence, wrote in zip(sequences[:-2], tokens[:-2], strict=True):
        pair(cache.gather(sequence, 0), wrote, "a sequence that is not in the batch")


@check("PAGED-16a", "paged")
def every_sequence_of_a_batch_may_take_blocks_at_once(subject: Subject) -> None:
    count, size = subject.size("sequences", 5), subject.size("block_size", 1)
    cache = with_room(subject, 2 * count + 2, block_size=1)
    sequences = [cache.create() for _ in range(count)]
    wrote = list[tuple[Pair, ...]]()  # per append, the tokens of each sequence
    for _ in range(size + 1):
        keys, values = pair_of_tokens(subject, count)
        cache.append(sequences, 0, keys, values)
        wrote.append(tuple((keys[row : row + 1], values[row : row + 1]) for row in range(count)))
    for row, (sequence, tokens) in enumerate(zip(sequences, zip(*wrote, strict=True), strict=True)):
        pair(cache.gather(sequence, 0), joined(*tokens), f"sequence {row} of {count}")
    in_use(subject, cache, dict.fromkeys(sequences, 2), f"after {len(wrote)} tokens per sequence")


@check("PAGED-16b", "paged")
def every_sequence_of_a_step_may_take_blocks_at_once(subject: Subject) -> None:
    count = subject.size("sequences", 5)
    cache = with_room(subject, count + 1, block_size=1)
    sequences, (keys, values) = [cache.create() for _ in range(count)], step_of(subject, cache, count)
    cache.append_step(sequences, keys, values)
    for row, sequence in enumerate(sequences):
        for layer in layers_of(cache):
            want = keys[layer, row : row + 1], values[layer, row : row + 1]
            pair(cache.gather(sequence, layer), want, f"layer {layer} of sequence {row} of {count}")
    in_use(subject, cache, dict.fromkeys(sequences, 1), "after a step")


def full(subject: Subject) -> tuple[Handle, dict[int, int], list[tuple[list[int], list[str]]]]:
    """Returns a full cache, the length of each sequence in layer 0, and (invalid batch, kinds of its error)."""
    cache = to_be_filled(subject, 4, block_size=2)
    size, first = cache.config["block_size"], cache.create()
    lengths, unknown, named = {first: room(cache) * size - 1}, ["SequenceNotFound"], first
    if subject.size("sequences", 2) > 1:
        named = cache.create()
        lengths = {first: (room(cache) - 1) * size, named: 1}
        unknown += ["OutOfBlocks"] if size == 1 else []  # then the pool has no block for the other token either
    for sequence, count in lengths.items():
        put(cache, sequence, 0, 0, *pair_of_tokens(subject, count))
    return cache, lengths, [([named, first], ["OutOfBlocks"]), ([named, max(lengths) + 77], unknown)]


def nothing_written(subject: Subject, cache: Handle, lengths: dict[int, int], when: str) -> None:
    equal({sequence: cache.length(sequence, 0) for sequence in lengths}, lengths, f"lengths {when}")
    size = cache.config["block_size"]
    in_use(subject, cache, {sequence: -(-length // size) for sequence, length in lengths.items()}, when)


@check("PAGED-16c", "paged")
def a_batch_that_does_not_fit_writes_nothing(subject: Subject) -> None:
    cache, lengths, batches = full(subject)
    for batch, kinds in batches:
        with raises(*kinds):
            cache.append(batch, 0, *pair_of_tokens(subject, len(batch)))
        nothing_written(subject, cache, lengths, f"after a batch without room raised {kinds[0]}")


@check("PAGED-16c", "paged")
def a_step_that_does_not_fit_writes_nothing(subject: Subject) -> None:
    cache, lengths, batches = full(subject)
    for batch, kinds in batches:
        with raises(*kinds):
            cache.append_step(batch, *step_of(subject, cache, len(batch)))
        nothing_written(subject, cache, lengths, f"after a batch without room raised {kinds[0]}")


@check("PAGED-17a", "paged")
def a_batch_is_gathered_with_its_offsets(subject: Subject) -> None:
    cache, sequences, tokens = several(subject)
    layer, none = layers_of(cache)[-1], (tokens[0][0][:0], tokens[0][1][:0])
    for order in orders(sequences, (0, 1, 2), (2, 0), (1,), (0,), (), (2, 2), (0, 0)):
        keys, values, offsets = cache.gather_batch([sequences[i] for i in order], layer)
        lengths = [len(tokens[i][0]) for i in order]
        equal([int(each) for each in offsets], [sum(lengths[:i]) for i in range(len(order) + 1)], f"offsets of {order}")
        pair((keys, values), joined(none, *(tokens[i] for i in order)), f"sequences {order}")


@check("PAGED-17b", "paged")
def lengths_of_a_batch_are_those_of_its_sequences(subject: Subject) -> None:
    cache, sequences, tokens = several(subject)
    for order in orders(sequences, (0, 1, 2), (2, 0), (1,), (0,), (), (2, 2), (0, 0)):
        lengths = [len(tokens[i][0]) for i in order]
        equal(list(cache.lengths([sequences[i] for i in order], layers_of(cache)[-1])), lengths, f"lengths of {order}")


@check("PAGED-17c", "paged")
def tables_of_a_batch_are_filled_up_with_minus_one(subject: Subject) -> None:
    cache, sequences, _ = several(subject, block_size=2)
    for layer in layers_of(cache):
        tables = [blocks_of(cache, sequence, layer) for sequence in sequences]
        for order in orders(sequences, (0, 1, 2), (2, 0), (1,), (0, 0)):
            got = np.asarray(cache.block_tables([sequences[i] for i in order], layer))
            most = max(len(tables[i]) for i in order)
            true(got.shape == (len(order), most), f"shape of block_tables of {order}", str((len(order), most)), got.shape)
            equal(got.tolist(), [tables[i] + [-1] * (most - len(tables[i])) for i in order], f"block_tables of {order}")
