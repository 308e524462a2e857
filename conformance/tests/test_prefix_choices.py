"""Prefix caches that make other choices than kvref's where the clauses allow several: none of them may fail."""

from itertools import pairwise

import numpy as np
import pytest

import kvref
from kvref.block_pool import BlockPool
from kvref.prefix import IndexedBlockPool
from kvref_conformance.calls.messages import CallRequest
from kvref_conformance.families.prefix.prefix_index_model import PrefixIndexState
from kvref_conformance.implementations.backends import OnBackend
from kvref_conformance.runner.check_runner import CheckRunner, select_checks
from kvref_conformance.runner.options import Effort


class FindsTheNewest(IndexedBlockPool):
    """Prefers the newest of several copies."""

    def find(self, key):
        found = self._index.get(key)
        return next(reversed(found.values())) if found else None


class ForgetsWhatFollows(IndexedBlockPool):
    """Blocks after a lost block become uncached, as in a tree."""

    def __init__(self, num_blocks):
        super().__init__(num_blocks)
        self.behind = {}

    def _remove_from_index(self, block):
        lost = [found.key for found in self._entries_of_block[block]]
        super()._remove_from_index(block)
        while lost:
            key = lost.pop()
            if key not in self._index:
                for follower in self.behind.get(key, ()):
                    for found in list(self._index.get(follower, {}).values()):
                        lost.append(follower)
                        self._forget(found)

    def _forget(self, found):
        del self._index[found.key][found.blocks.tobytes()]
        if not self._index[found.key]:
            del self._index[found.key]
        for block in found.blocks.tolist():
            del self._entries_of_block[block][found]
            if not self._entries_of_block[block]:
                del self._entries_of_block[block]
                if block in self._evictable:
                    del self._evictable[block]
                    BlockPool._return_blocks(self, np.array([block], np.int32))


class TakesTheNewest(IndexedBlockPool):
    def _pop_free_blocks(self, count):
        taken = []
        while len(taken) < count:
            if self._evictable:
                block, _ = self._evictable.popitem()
                self._remove_from_index(block)
                taken.append(block)
            else:
                taken += BlockPool._pop_free_blocks(self, 1).tolist()
        return np.array(taken, np.int32)


class TakesAny(IndexedBlockPool):
    def _pop_free_blocks(self, count):
        rng, taken = np.random.default_rng(self.num_free), []
        while len(taken) < count:
            if self._evictable and (rng.random() < 0.5 or not BlockPool.num_free.fget(self)):
                block = int(rng.choice(list(self._evictable)))
                del self._evictable[block]
                self._remove_from_index(block)
                taken.append(block)
            else:
                taken += BlockPool._pop_free_blocks(self, 1).tolist()
        return np.array(taken, np.int32)


class Merges(kvref.PrefixCache):
    """Equal blocks are merged when they are committed: the existing one stays."""

    def commit(self, sequence, tokens):
        known = len(self._committed[int(sequence)].keys) if int(sequence) in self._committed else 0
        super().commit(sequence, tokens)
        table, layers = self._table(sequence), range(self.config.num_layers)
        for entry, key in enumerate(self._committed[int(sequence)].keys[known:], known):
            there, own = self.pool.find(key), self._tables.at(table, np.arange(len(layers)), entry)
            if there is not None and not np.array_equal(there.blocks, own):
                mine = next(found for found in self.pool._index[key].values() if np.array_equal(found.blocks, own))
                ForgetsWhatFollows._forget(self.pool, mine)
                self.pool.share_many(there.blocks)
                for layer, block in zip(layers, there.blocks.tolist(), strict=True):
                    self._tables.replace(table, layer, entry, block)
                self.pool.free_many(own)


class Tree(kvref.PrefixCache):
    def commit(self, sequence, tokens):
        super().commit(sequence, tokens)
        keys = self._committed[int(sequence)].keys
        for one, other in pairwise(keys):
            self.pool.behind.setdefault(one, set()).add(other)


class MergingTree(Tree, Merges):
    pass


class TakesAnyOfATree(ForgetsWhatFollows, TakesAny):
    pass


ANY_ORDER = {"other_eviction_order": True}
CHOICES = {
    "the newest copy": (kvref.PrefixCache, FindsTheNewest, {}), "merges": (Merges, IndexedBlockPool, {}),
    "merges with the newest": (Merges, FindsTheNewest, {}), "a tree": (Tree, ForgetsWhatFollows, {}),
    "the newest goes first": (kvref.PrefixCache, TakesTheNewest, ANY_ORDER), "any goes": (kvref.PrefixCache, TakesAny, ANY_ORDER),
    "any goes of a tree that merges": (MergingTree, TakesAnyOfATree, ANY_ORDER),
}  # fmt: skip


def judged(choice):
    cache, pool, limits = CHOICES[choice]

    class Chosen(OnBackend):
        def prefix(self, **config):
            made = cache(kvref.PagedConfig(**config), self.backend)
            made.pool = pool(config["num_blocks"])
            return made

    chosen = Chosen(kvref.reference)
    chosen.limits = limits
    return CheckRunner(chosen, Effort(examples=60))


ONE_OF_ALL = "merges with the newest"  # has two of the choices; nox -s long judges the others


@pytest.mark.extended
@pytest.mark.parametrize(
    "choice", [ONE_OF_ALL, *(pytest.param(each, marks=pytest.mark.long) for each in CHOICES if each != ONE_OF_ALL)]
)
def test_it_is_not_blamed(choice):
    judge = judged(choice)
    for clause, checks in select_checks("PREFIX-*,PAGED-*,LAW-03", "prefix").items():
        failed = [outcome for outcome in judge.judge_clause(checks) if outcome.verdict == "failed"]
        assert not failed, (clause.id, failed)


ROWS = np.ones((6, 1, 2), np.float32)
KEPT = [1, 1, 1, 1, 1, 1], [9, 9]  # committed: one prompt in three blocks, the other in one
LOST_IN_THE_MIDDLE = [  # of a pool of 6 blocks of 2 tokens
    ("begin", {"tokens": KEPT[0]}),
    ("write", {"sequence": 0, "layer": 0, "start": 0, "keys": ROWS, "values": ROWS}),
    ("commit", {"sequence": 0, "tokens": KEPT[0]}),
    ("begin", {"tokens": KEPT[1]}),
    ("write", {"sequence": 1, "layer": 0, "start": 0, "keys": ROWS[:2], "values": ROWS[:2]}),
    ("commit", {"sequence": 1, "tokens": KEPT[1]}),
    # to a copy: the second block becomes evictable
    ("write", {"sequence": 0, "layer": 0, "start": 2, "keys": ROWS[:1], "values": ROWS[:1]}),
    ("drop", {"sequence": 1}),
    ("drop", {"sequence": 0}),
    ("create", {}),
    ("write", {"sequence": 2, "layer": 0, "start": 0, "keys": ROWS, "values": ROWS}),  # evicts the second block
    ("write", {"sequence": 2, "layer": 0, "start": 6, "keys": ROWS[:2], "values": ROWS[:2]}),
    ("match", {"tokens": [*KEPT[1], 0]}),
]


def held(choice, calls, **sizes):
    sizes = {"block_size": 2, "num_layers": 1, "num_kv_heads": 1, "head_dim": 2, "dtype": "float32"} | sizes
    made = [(None, "new", sizes), *((1, name, args) for name, args in calls)]
    return judged(choice).replay(
        [CallRequest(number, f"prefix.{name}", on, args) for number, (on, name, args) in enumerate(made, 1)]
    )


@pytest.mark.parametrize(("choice", "found"), [("merges", 0), ("a tree", 2)])
def test_what_lies_behind_a_block_that_was_lost_may_be_kept_or_not(choice, found):
    once = held(choice, LOST_IN_THE_MIDDLE, num_blocks=6)
    assert once.violation is None and once.call_trace[-1].reply.ok == found
    again = [
        (name, args | {"sequence": args["sequence"] + 3} if "sequence" in args else args) for name, args in LOST_IN_THE_MIDDLE
    ]
    twice = held(choice, [*LOST_IN_THE_MIDDLE[:-1], ("drop", {"sequence": 2}), ("reset", {}), *again], num_blocks=6)
    assert twice.violation is None and twice.call_trace[-1].reply.ok == found


def test_where_there_are_too_many_ways_nobody_is_blamed():
    """Each of several copies of the same tokens may have been merged with any earlier one."""

    def written(sequence, tokens):
        rows = ROWS[:2] if tokens else np.ones((10, 1, 2), np.float32)
        calls = [("create", {}), ("write", {"sequence": sequence, "layer": 0, "start": 0, "keys": rows, "values": rows})]
        return [*calls, *([("commit", {"sequence": sequence, "tokens": tokens})] if tokens else [])]

    same, first = range(1, 7), written(0, [9, 9])
    calls = [*first, *(call for sequence in same for call in written(sequence, [1, 1])[:2])]
    calls += [("commit", {"sequence": sequence, "tokens": [1, 1]}) for sequence in same]
    calls += [("drop", {"sequence": sequence}) for sequence in range(7)]
    assert held("merges", [*calls, *written(7, []), ("match", {"tokens": [9, 9, 0]})], num_blocks=8).violation is None


def test_ways_differ_in_what_is_found_and_when_it_goes_whatever_the_names():
    def kept(first=1, **changes):
        made = PrefixIndexState(1)
        made.tables = {0: [[first]]}
        made.index = {("", (token, token)): [(first + token,)] for token in range(3)}
        made.evictable = {first + 1: (3, 0), first + 2: (4, 0)}
        for name, value in changes.items():
            setattr(made, name, value)
        return made.form()

    assert kept() == kept(5)
    others = [
        kept(orphans=True), kept(hits={0: 1}), kept(unsure={3}), kept(blocks={3: 7}), kept(whole=True),
        kept(evictable={2: (4, 0), 3: (3, 0)}), kept(index={("", (1, 1)): [(1,)], ("", (2, 2)): [(2,), (3,)]}),
    ]  # fmt: skip
    assert len({kept(), *others}) == 1 + len(others)


class WithoutLabels(OnBackend):
    """A prefix cache whose methods have no parameter for `adapter` and `media`."""

    def prefix(self, **config):
        cache = super().prefix(**config)
        begin, match = cache.begin, cache.match
        cache.begin = lambda tokens, salt="": begin(tokens, salt)
        cache.match = lambda tokens, salt="": match(tokens, salt)
        return cache


@pytest.mark.parametrize(("clause", "argument"), [("PREFIX-17", "adapter"), ("PREFIX-18", "media")])
def test_an_optional_argument_without_a_parameter_is_not_offered(clause, argument):
    runner, ((_, checks),) = CheckRunner(WithoutLabels(kvref.backend("numpy"))), select_checks(clause).items()
    outcomes = [runner.judge_check(check) for check in checks if check.run]
    assert {outcome.missing for outcome in outcomes} == {
        f"prefix.match with the argument {argument}",
        f"prefix.begin with the argument {argument}",
    }
