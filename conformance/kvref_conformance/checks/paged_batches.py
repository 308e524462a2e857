"""PAGED: a token for each of many sequences, and reading many at once."""

from typing import Any

import numpy as np

from kvref_conformance.arrays import NDArray
from kvref_conformance.checking.expect import equal, pair, raises, true
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import blocks_of, new, pair_of_tokens
from kvref_conformance.drivers.in_process import Handle, Subject

Pair = tuple[NDArray, NDArray]


def joined(*pairs: Pair) -> Pair:
    keys, values = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    return keys, values


def three(subject: Subject, **config: Any) -> tuple[Handle, list[int], list[Pair]]:
    """A cache with sequences of 3, 0 and 5 tokens in both layers, and the tokens of each."""
    cache, tokens = new(subject, "paged", **config), [pair_of_tokens(subject, count) for count in (3, 0, 5)]
    sequences = [cache.create() for _ in tokens]
    for sequence, (keys, values) in zip(sequences, tokens, strict=True):
        for layer in (0, 1):
            cache.write(sequence, layer, 0, keys, values)
    return cache, sequences, tokens


@check("PAGED-16", "paged")
def a_batch_is_appended_one_by_one(subject: Subject) -> None:
    cache, sequences, tokens = three(subject)
    for order in ((2, 0, 1), (1, 2), (0,), (), (0, 1, 0)):
        keys, values = pair_of_tokens(subject, len(order))
        cache.append([sequences[i] for i in order], 0, keys, values)
        for row, i in enumerate(order):
            tokens[i] = joined(tokens[i], (keys[row : row + 1], values[row : row + 1]))
        for i, sequence in enumerate(sequences):
            pair(cache.gather(sequence, 0), tokens[i], f"sequence {i} after appending to {order}")
            equal(cache.length(sequence, 1), (3, 0, 5)[i], "length of the layer that was not appended to")


@check("PAGED-16", "paged")
def a_batch_goes_to_the_sequences_it_names(subject: Subject) -> None:
    cache, sequences, tokens = three(subject)
    cache.drop(sequences[0])
    last = cache.create()
    keys, values = pair_of_tokens(subject, 2)
    cache.append([last, sequences[2]], 1, keys, values)
    pair(cache.gather(last, 1), (keys[:1], values[:1]), "a sequence made after another was dropped")
    pair(cache.gather(sequences[2], 1), joined(tokens[2], (keys[1:], values[1:])), "the other of the batch")
    equal(cache.length(sequences[1], 1), 0, "length of the sequence that was not named")


@check("PAGED-16", "paged")
def a_step_is_appended_in_every_layer(subject: Subject) -> None:
    cache, sequences, tokens = three(subject)
    more = pair_of_tokens(subject, 1)
    cache.write(sequences[2], 0, 5, *more)  # layer 1 of it is a token behind
    keys, values = (np.stack(each) for each in zip(*(pair_of_tokens(subject, 2) for _ in (0, 1)), strict=True))
    cache.append_step([sequences[2], sequences[1]], keys, values)
    for layer, before in enumerate((joined(tokens[2], more), tokens[2])):
        pair(cache.gather(sequences[2], layer), joined(before, (keys[layer, :1], values[layer, :1])), f"layer {layer}")
        pair(cache.gather(sequences[1], layer), (keys[layer, 1:], values[layer, 1:]), f"layer {layer} of an empty sequence")
    pair(cache.gather(sequences[0], 0), tokens[0], "a sequence that is not of the batch")


@check("PAGED-16", "paged")
def every_sequence_of_a_batch_may_take_blocks_at_once(subject: Subject) -> None:
    cache = new(subject, "paged", block_size=1)
    sequences = [cache.create() for _ in range(5)]
    keys, values = (np.stack(each) for each in zip(*(pair_of_tokens(subject, 5) for _ in (0, 1)), strict=True))
    cache.append_step(sequences, keys, values)
    cache.append(sequences, 0, keys[1], values[1])
    for row, sequence in enumerate(sequences):
        wrote = [(part[0, row : row + 1], part[1, row : row + 1]) for part in (keys, values)]
        pair(cache.gather(sequence, 0), joined(*zip(*wrote, strict=True)), f"sequence {row} of 5")
        pair(cache.gather(sequence, 1), (wrote[0][1], wrote[1][1]), f"sequence {row} of 5, layer 1")
    equal(cache.num_free_blocks, 4, "free blocks of 24 after 2 tokens a sequence")


@check("PAGED-16", "paged")
def a_batch_that_does_not_fit_writes_nothing(subject: Subject) -> None:
    cache = new(subject, "paged", num_blocks=8, block_size=2)
    sequences = [cache.create() for _ in range(3)]
    for sequence, count in zip(sequences, (2, 4, 1), strict=True):
        cache.write(sequence, 0, 0, *pair_of_tokens(subject, count))  # 2, 4 and 2 blocks: none is left
    keys, values = pair_of_tokens(subject, 3)
    for batch, kind in ((sequences[::-1], "OutOfBlocks"), ([sequences[2], 77], "SequenceNotFound")):
        count = len(batch)
        with raises(kind):
            cache.append(batch, 0, keys[:count], values[:count])
        with raises(kind):
            cache.append_step(batch, np.stack([keys[:count]] * 2), np.stack([values[:count]] * 2))
        equal([cache.length(sequence, 0) for sequence in sequences], [2, 4, 1], f"lengths after {kind}")
        equal(cache.num_free_blocks, 0, f"free blocks after {kind}")


@check("PAGED-17", "paged")
def a_batch_is_gathered_with_its_offsets(subject: Subject) -> None:
    cache, sequences, tokens = three(subject)
    for order in ((0, 1, 2), (2, 0), (1,), (), (2, 2)):
        keys, values, offsets = cache.gather_batch([sequences[i] for i in order], 1)
        lengths = [len(tokens[i][0]) for i in order]
        equal([int(each) for each in offsets], [sum(lengths[:i]) for i in range(len(order) + 1)], f"offsets of {order}")
        pair((keys, values), joined(tokens[1], *(tokens[i] for i in order)), f"sequences {order}")
        equal(list(cache.lengths([sequences[i] for i in order], 1)), lengths, f"lengths of {order}")


@check("PAGED-17", "paged")
def tables_of_a_batch_are_filled_up_with_minus_one(subject: Subject) -> None:
    cache, sequences, _ = three(subject, block_size=2)
    for layer in (0, 1):
        tables = [blocks_of(cache, sequence, layer) for sequence in sequences]
        for order in ((0, 1, 2), (2, 0), (1,), (0, 0)):
            got = np.asarray(cache.block_tables([sequences[i] for i in order], layer))
            most = max(len(tables[i]) for i in order)
            true(got.shape == (len(order), most), f"shape of block_tables of {order}", str((len(order), most)), got.shape)
            equal(got.tolist(), [tables[i] + [-1] * (most - len(tables[i])) for i in order], f"block_tables of {order}")
