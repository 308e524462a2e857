"""Faults in a minimal engine with three requests, each with the diagnosis that is expected."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvref import PrefixCache
from kvref.canary import BOS, FIRST_WORD, Canary
from kvref.engine import Engine
from kvref_canary.diagnosis.case import RequestHistory


def prompt_of(canary, count, seed):
    """Words that are all different if a canary recalls them."""
    rng = np.random.default_rng(seed)
    words = rng.permutation(canary.words)[:count] if canary.recalls else rng.integers(canary.words, size=count)
    return [BOS, *(int(word) + FIRST_WORD for word in words)]


class Coarse(PrefixCache):
    """Keys are rounded to multiples of a step."""

    def __init__(self, config, step):
        super().__init__(config)
        self.step = step

    def write(self, sequence, layer, start, keys, values):
        super().write(sequence, layer, start, np.round(keys / self.step) * np.float32(self.step), values)


@dataclass
class Scene:
    """Request b, which goes wrong; a, which has ended; and c, which continues."""

    canary: Canary
    step: float | None = None  # of the keys
    events: list[tuple[int, str]] = field(default_factory=list)
    more: list[RequestHistory] = field(default_factory=list)

    def __post_init__(self):
        self.engine = Engine(self.canary, 3200)
        self.renew(Coarse(self.cache.config, self.step) if self.step else self.cache)

    def renew(self, cache):
        """Replace the cache with another one."""
        self.engine.cache = self.engine._model.cache = cache
        self.a, self.b, self.c = (self.engine.open() for _ in range(3))
        self.prompts = [prompt_of(self.canary, count, seed) for seed, count in ((1, 130), (2, 99), (3, 130))]
        for session, prompt in ((self.a, self.prompts[0]), (self.c, self.prompts[2])):
            self.engine.extend(session, prompt)
        self.begin(self.prompts[1])

    def begin(self, tokens):
        """Give b only these tokens as its prompt.

        No prefix is found, so that the engine computes all of it in its present state.
        """
        self.engine.truncate(self.b, 0)
        self.cache.pool.clear_index()
        self.told = list(tokens)
        self.engine.extend(self.b, self.told)

    @property
    def cache(self):
        return self.engine.cache

    def sequence(self, session):
        return self.engine._sequence[session]

    def table(self, session):
        """The block ids [entries, layers], readable and writable."""
        return _Entries(self.cache._tables._blocks[self.cache._table_of[self.sequence(session)]])

    def spoil(self, layers, heads, start, stop, change):
        """Apply `change` to keys and values [tokens, num_kv_heads, head_dim] of positions [start, stop) of a layer."""
        for layer in layers:
            keys, values = (np.array(part) for part in self.cache.read(self.sequence(self.b), layer, range(start, stop)))
            for own, other in zip((keys, values), change(layer, keys.copy(), values.copy()), strict=True):
                own[:, heads] = other[:, heads]
            self.cache.write(self.sequence(self.b), layer, start, keys, values)

    def said(self, count):
        """Return the history of request b with its generated tokens, and the histories of the other requests.

        For a canary that recalls, b is extended by every second word of its prompt and generates one token after each.
        """
        before = len(self.engine._tokens[self.b])
        if self.canary.recalls:
            for word in self.prompts[1][20:-1:2]:
                self.engine.extend(self.b, [word])
                self.engine.generate(self.b, 1)
            tokens = self.told + self.engine._tokens[self.b][before:]
            said = range(len(self.told) + 1, len(tokens), 2)
        else:
            self.engine.generate(self.b, count)
            tokens = self.told + self.engine._tokens[self.b][before:]
            said = range(len(self.told), len(tokens))
        others = [
            RequestHistory("request a", self.prompts[0], ended=True),
            RequestHistory("request c", self.prompts[2]),
            *self.more,
        ]
        return RequestHistory("request b", tokens, said, events=tuple(self.events)), others


class _Entries:
    """The lists of block ids of a sequence's layers, indexed as an array [entries, layers]."""

    def __init__(self, layers):
        self._layers = layers

    def __getitem__(self, index):
        return np.array(self._layers).T[index]

    def __setitem__(self, index, blocks):
        entries = np.array(self._layers).T
        entries[index] = blocks
        for layer, changed in zip(self._layers, entries.T.tolist(), strict=True):
            layer[:] = changed


# The faults.

OFFSETS = Canary(offsets=(13, 34))  # not multiples of a block, so that two layers show different offsets
FOUR = Canary(offsets=(13, 34), num_kv_heads=4)
WINDOWS = Canary(offsets=(16, 31), windows=(16, 40))
RECALLS = Canary(offsets=(1,), recalls=True, theta=1e6, head_dim=128)
FAULTS: list["Fault"] = []


@dataclass
class Fault:
    """A fault and its expected diagnosis.

    plant: corrupts a scene whose request has a prompt, before the first generated token. facts: of the expected finding, which is
    one of `among` findings that fit equally well.
    """

    plant: Callable[[Scene], None]
    canary: Canary
    kind: str
    facts: dict[str, object]
    among: int

    @property
    def name(self) -> str:
        sort = "recalls" if self.canary.recalls else "windows" if self.canary is WINDOWS else "offsets"
        return f"{self.plant.__name__}-{sort}"


def fault(canary, kind, among=1, **facts):
    def register(plant):
        FAULTS.append(Fault(plant, canary, kind, facts, among))
        return plant

    return register


@fault(OFFSETS, "another", other="request c", start=80, stop=96, layers=(), heads=(), shift=0, block=16)
@fault(RECALLS, "another", other="request c", layers=(1,), within=(80, 96), shift=0)
def anothers_block(scene):
    scene.table(scene.b)[5] = scene.table(scene.c)[5]


@fault(OFFSETS, "another", other="request c", start=80, stop=96, layers=(1,), heads=(), shift=0, block=16)
@fault(RECALLS, "another", other="request c", layers=(1,), within=(80, 96), shift=0)
def anothers_block_in_the_last_layer(scene):
    scene.table(scene.b)[5, 1] = scene.table(scene.c)[5, 1]


@fault(OFFSETS, "another", other="request c", start=87, stop=96, within=(80, 96), layers=(0,), heads=(), shift=0)
def anothers_block_in_the_first_layer(scene):
    scene.table(scene.b)[5, 0] = scene.table(scene.c)[5, 0]


@fault(OFFSETS, "another", other="request c", start=80, stop=96, layers=(), heads=(1,), shift=0)
@fault(RECALLS, "unknown", heads=(1,))
def anothers_block_in_a_head(scene):
    def change(layer, keys, values):
        return scene.cache.read(scene.sequence(scene.c), layer, range(80, 96))

    scene.spoil(range(scene.canary.num_layers), [1], 80, 96, change)


@fault(OFFSETS, "another", other="request c", start=80, stop=96, shift=-32, part="values", block=16)
@fault(RECALLS, "another", other="request c", within=(80, 96), shift=-32, part="values", block=16)
def anothers_values_of_another_place(scene):
    def change(layer, keys, values):
        return keys, scene.cache.read(scene.sequence(scene.c), layer, range(48, 64))[1]

    scene.spoil(range(scene.canary.num_layers), [0, 1], 80, 96, change)


@fault(OFFSETS, "unreadable", start=80, stop=96)
@fault(RECALLS, "unknown")
def anothers_block_of_another_place(scene):
    scene.table(scene.b)[5] = scene.table(scene.c)[3]


@fault(OFFSETS, "earlier occupant", other="request a", start=80, stop=96, shift=0, layers=(), block=16)
@fault(RECALLS, "earlier occupant", other="request a", within=(80, 96), shift=0)
def an_earlier_occupants_block(scene):
    block = scene.table(scene.a)[5].copy()
    scene.cache.ensure_capacity(scene.sequence(scene.b), 250)  # otherwise it would allocate the block
    scene.engine.close(scene.a)
    scene.table(scene.b)[5] = block


@fault(OFFSETS, "swapped", within=(64, 96), shift=16, part="values", layers=())
@fault(RECALLS, "swapped", within=(64, 96), shift=16, part="values")
def the_values_of_two_blocks_swapped(scene):
    def change(layer, keys, values):
        return keys, np.roll(values, 16, axis=0)

    scene.spoil(range(scene.canary.num_layers), [0, 1], 64, 96, change)


@fault(OFFSETS, "own", start=80, stop=96, shift=-1, part="values", layers=())
@fault(RECALLS, "own", within=(80, 96), shift=-1, part="values")
def the_values_of_a_block_one_too_early(scene):
    def change(layer, keys, values):
        return keys, scene.cache.read(scene.sequence(scene.b), layer, range(79, 95))[1]

    scene.spoil(range(scene.canary.num_layers), [0, 1], 80, 96, change)


@fault(OFFSETS, "zeros", start=80, stop=96, part="values", block=16)
@fault(RECALLS, "zeros", part="values", within=(80, 96))
def values_of_zeros(scene):
    scene.spoil(range(scene.canary.num_layers), [0, 1], 80, 96, lambda layer, keys, values: (keys, values * 0))


@fault(OFFSETS, "unreadable", start=80, stop=96)
@fault(RECALLS, "unreadable", within=(80, 96))
def keys_of_zeros(scene):
    scene.spoil(range(scene.canary.num_layers), [0, 1], 80, 96, lambda layer, keys, values: (keys * 0, values))


@fault(OFFSETS, "unreadable", start=80, stop=96)
@fault(RECALLS, "unreadable", within=(80, 96))
def a_block_of_zeros(scene):
    scene.spoil(range(scene.canary.num_layers), [0, 1], 80, 96, lambda layer, keys, values: (keys * 0, values * 0))


@fault(OFFSETS, "zeros", layers=(0,), part="values")
def values_of_zeros_in_the_first_layer_of_a_head(scene):
    scene.spoil([0], [1], 80, 96, lambda layer, keys, values: (keys, values * 0))


@fault(OFFSETS, "turned", shift=1, start=80, stop=96, layers=())
def keys_turned_one_too_far(scene):
    def change(layer, keys, values):
        return np.concatenate([scene.engine._model._turned(key[None], 1) for key in keys]), values

    scene.spoil(range(2), [0, 1], 80, 96, change)


@fault(OFFSETS, "turned", shift=1, start=80, open=True, layers=())
def keys_turned_one_too_far_from_some_place_on(scene):
    class Turned(PrefixCache):
        def write(self, sequence, layer, start, keys, values):
            by = [1 if start + number >= 80 else 0 for number in range(len(keys))]
            turned = [scene.engine._model._turned(key[None], each) for key, each in zip(keys, by, strict=True)]
            super().write(sequence, layer, start, np.concatenate(turned), values)

    scene.renew(Turned(scene.cache.config))


def rotate(scene, keys, by):
    """Keys [tokens, num_kv_heads, head_dim], rotated `by` positions further; a negative `by` rotates them back."""
    model = scene.engine._model
    cos, sin, half = model._cos[abs(by)], model._sin[abs(by)] * np.sign(by), scene.canary.head_dim // 2
    first, second = keys[..., :half], keys[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(np.float32)


@fault(OFFSETS, "turned", shift=-16, start=80, open=True, layers=(), after="a removal")
def keys_of_all_later_tokens_rotated_as_if_nothing_was_removed(scene):
    """After a removal of 16 tokens, the engine counts positions from the old length, in the wrong direction."""

    class Rotated(PrefixCache):
        def write(self, sequence, layer, start, keys, values):
            before = max(0, 80 - start)
            super().write(sequence, layer, start, np.concatenate([keys[:before], rotate(scene, keys[before:], -16)]), values)

    scene.renew(Rotated(scene.cache.config))
    scene.events.append((80, "a removal"))


@fault(OFFSETS, "turned", shift=-4, start=80, stop=100, open=False, layers=())
def keys_of_the_tokens_after_a_removal_rotated_too_little(scene):
    scene.events.append((100, "a removal"))
    scene.spoil(range(2), [0, 1], 80, 100, lambda layer, keys, values: (rotate(scene, keys, -4), values))


@fault(OFFSETS, "earlier occupant", 2, other="request a", shift=36, start=84, stop=88, after="a close of request a")
def a_late_write_of_a_closed_request(scene):
    """Four tokens of request a, of later positions, are written to the slots that b has got."""
    late = [[np.array(part) for part in scene.cache.read(scene.sequence(scene.a), layer, range(120, 124))] for layer in range(2)]
    scene.cache.ensure_capacity(scene.sequence(scene.b), 250)
    scene.engine.close(scene.a)
    scene.spoil(range(2), [0, 1], 84, 88, lambda layer, keys, values: late[layer])
    scene.events.append((100, "a close of request a"))


@fault(OFFSETS, "stale", start=90, stop=100, layers=(1,), shift=7, other="request b before a removal", after="a removal")
@fault(WINDOWS, "stale", start=90, stop=100, layers=(1,), shift=7, other="request b before a removal", after="a removal")
def values_computed_before_a_removal(scene):
    """Seven tokens are removed, and the entries after them are kept: their keys are rotated, their values are not recomputed."""
    told = scene.told
    before = told[:90] + prompt_of(scene.canary, 7, 9)[1:] + told[90:]
    scene.begin(before)
    kept = [scene.cache.read(scene.sequence(scene.b), layer, range(97, len(before))) for layer in range(2)]
    scene.begin(told)
    scene.spoil(range(2), [0, 1], 90, len(told), lambda layer, keys, values: (rotate(scene, kept[layer][0], -7), kept[layer][1]))
    scene.more.append(RequestHistory("request b before a removal", before, ended=True))
    scene.events.append((90, "a removal"))


@fault(OFFSETS, "unknown")
def a_chunk_is_written_a_slot_late(scene):
    """And the next chunk overwrites its end: all entries are found by their keys except the last."""
    late = [scene.cache.read(scene.sequence(scene.b), layer, range(80, 95)) for layer in range(2)]
    scene.spoil(range(2), [0, 1], 80, 81, lambda layer, keys, values: (keys * 0, values * 0))
    scene.spoil(range(2), [0, 1], 81, 96, lambda layer, keys, values: late[layer])


@fault(OFFSETS, "head", shift=0, heads=(1,), start=80, stop=96)
@fault(RECALLS, "head", shift=0, heads=(1,), within=(80, 96))
def a_head_holds_what_another_should(scene):
    def change(layer, keys, values):
        return keys[:, [0, 0]], values[:, [0, 0]]

    scene.spoil(range(scene.canary.num_layers), [1], 80, 96, change)


@fault(FOUR, "heads", shift=1, start=80, stop=96, layers=(), heads=())
def the_heads_of_a_block_are_turned(scene):
    def change(layer, keys, values):
        return np.roll(keys, -1, axis=1), np.roll(values, -1, axis=1)

    scene.spoil(range(2), range(4), 80, 96, change)


@fault(FOUR, "head", shift=0, start=80, stop=96, heads=(1, 2, 3))
def all_heads_hold_the_first(scene):
    scene.spoil(range(2), range(4), 80, 96, lambda layer, keys, values: (keys[:, [0] * 4], values[:, [0] * 4]))


@fault(OFFSETS, "layer", layers=(1,), shift=0)
@fault(RECALLS, "unknown")
def a_layer_reads_the_one_before(scene):
    scene.table(scene.b)[:6, 1] = scene.table(scene.b)[:6, 0]


@fault(WINDOWS, "window", layers=(0,), shift=17, due=16)
def a_window_one_too_wide(scene):
    sizes = {"offsets": (16, 31), "windows": (17, 40)}
    scene.engine._model.canary = Canary(**sizes)
    scene.begin(scene.told)


@fault(WINDOWS, "window", layers=(0,), shift=15, due=16)
def a_window_one_too_narrow(scene):
    scene.engine._model.canary = Canary(offsets=(15, 31), windows=(15, 40))
    scene.begin(scene.told)


@fault(WINDOWS, "window", layers=(0,), due=16)
def no_window(scene):
    scene.engine._model.canary = Canary(offsets=(16, 31), windows=(None, 40))
    scene.begin(scene.told)


@fault(OFFSETS, "unknown")
def two_tokens_of_a_head_swapped(scene):
    scene.spoil([1], [1], 85, 87, lambda layer, keys, values: (keys, values[::-1]))


def forked(scene, shared):
    """Request d, a fork of b at its end or before: its tokens, and those that it generates itself."""
    d = scene.engine.open()
    tokens = scene.told[:shared] + prompt_of(scene.canary, 150, 4)[1 : 1 + 110 - shared]
    scene.engine.extend(d, tokens)
    scene.more.append(RequestHistory("request d", tokens))
    scene.events.append((shared, f"a fork at {shared}"))
    return d


@fault(OFFSETS, "another", other="request d", start=88, stop=96, layers=(0,), shift=0, after="a fork at 88")
@fault(RECALLS, "unknown")
def a_fork_writes_into_the_block_it_shares(scene):
    scene.table(scene.b)[5] = scene.table(forked(scene, 88))[5]


@fault(OFFSETS, "unreadable", start=80, stop=90, after="a fork at 90")
def the_last_block_is_lost_at_a_fork(scene):
    scene.events.append((90, "a fork at 90"))
    scene.spoil(range(2), [0, 1], 80, 90, lambda layer, keys, values: (keys * 0, values * 0))


@fault(OFFSETS, "another", other="request e", start=72, stop=76, layers=(0,), after="a prefix hit of 72")
@fault(RECALLS, "unknown")
def a_prefix_hit_of_too_many(scene):
    """Request e has the same 72 tokens and then others; b takes 4 of those for its own."""
    tokens = scene.told[:72] + prompt_of(scene.canary, 60, 5)[1:]
    e = scene.engine.open()
    scene.engine.extend(e, tokens)
    scene.engine.truncate(scene.b, 0)
    scene.engine.extend(scene.b, tokens[:76])
    scene.engine.extend(scene.b, scene.told[76:])
    scene.more.append(RequestHistory("request e", tokens))
    scene.events.append((72, "a prefix hit of 72"))


@fault(OFFSETS, "dropped", among=3, start=68, stop=80)
def a_chunk_is_dropped(scene):
    told = scene.told
    scene.begin(told[:68] + told[80:])
    scene.told = told


@fault(OFFSETS, "twice", start=64, stop=80)
def a_chunk_is_written_twice(scene):
    told = scene.told
    scene.begin(told[:80] + told[64:])
    scene.told = told


@fault(OFFSETS, "left over", other="b before", start=80, stop=90)
def a_truncation_leaves_stale_tokens(scene):
    before = scene.told[:80] + prompt_of(scene.canary, 10, 6)[1:]
    told = scene.told
    scene.begin(before + told[80:])
    scene.told = told
    scene.more.append(RequestHistory("b before", before, ended=True))
    scene.events.append((80, "a truncation to 80"))


@fault(OFFSETS, "another", other="request f", start=66, stop=80, within=(64, 80), shift=0, after="a cancel at 100")
def a_cancelled_requests_blocks_are_given_away(scene):
    """Request f was allocated a block that b still reads."""
    f = scene.engine.open()
    tokens = prompt_of(scene.canary, 120, 7)
    scene.engine.extend(f, tokens)
    scene.events.append((100, "a cancel at 100"))
    scene.more.append(RequestHistory("request f", tokens))
    scene.table(scene.b)[4] = scene.table(f)[4]
