"""The reference model of the prefix cache: the paged model, and a dict of committed blocks by salt and tokens."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from kvref_conformance.families.paged.model import NewOrRefused, Paged
from kvref_conformance.families.paged.ownership_model import Alternative, OwnershipState, outcome
from kvref_conformance.families.paged.table_model import LayerTable, Token
from kvref_conformance.families.prefix.prefix_index_model import MOST_TOKEN, Hit, Key, PrefixIndexState, follows, no_tokens, same
from kvref_conformance.oracle.expectations import AnyOf, Expectation, ExpectedError, UnjudgedReply, Wrong, not_in_range
from kvref_conformance.oracle.reference_model import Look

SHOWN = 3  # the number of prompts that are matched after each call
UNSEEN = 2**40  # a last token, so that all tokens before it can be found


class Prefix(Paged):
    family = "prefix"
    blamed: ClassVar = Paged.blamed | {
        **{("begin", seen): "PREFIX-01" for seen in ("num_free_blocks", "length", "block_table")},
        **{("commit", seen): "PREFIX-10" for seen in ("num_free_blocks", "length", "block_table")},
        ("none begun", "num_free_blocks"): "PREFIX-13", ("none begun", "block_table"): "PREFIX-13",
        ("reset", "num_free_blocks"): "PREFIX-11",
    }  # fmt: skip

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        kept = PrefixIndexState(self.layers)
        kept.total, kept.size = self.total, self.size
        self.ways: list[OwnershipState] = [kept]
        self.told: dict[int, tuple[str, list[int]]] = {}  # sequence -> (salt, committed tokens)
        self.begun: dict[int, list[int]] = {}  # sequence -> its prompt, while its hit was not observed
        self.asked: list[int] = []  # the last prompt
        self.rows: dict[Key, list[list[Token]]] = {}  # committed block -> its tokens in each layer, since the last reset
        self.forgotten: set[Key] = set()  # blocks that were committed before the last reset

    def declared(self, switch: Callable[[str], bool]) -> None:
        super().declared(switch)
        for held in self.kept:
            held.any_order = switch("other_eviction_order")

    @property
    def kept(self) -> list[PrefixIndexState]:
        return [held for held in self.ways if isinstance(held, PrefixIndexState)]

    def looks(self) -> list[Look]:
        """Returns the observations of the paged cache (lengths only of changed sequences), and the match of the last prompts."""
        found: list[Look] = [
            ("length", {"sequence": sequence, "layer": layer})
            for sequence in self.sequences
            for layer in range(self.layers)
            if sequence in self.touched
        ]
        found += [look for look in super().looks() if look[0] not in ("length", "utilization")]
        longest = [key for key in self.rows if not any(follows(other, key) for other in self.rows)]
        return found + [("match", {"tokens": [*tokens, UNSEEN], "salt": salt}) for salt, tokens in longest[-SHOWN:]]

    def create(self) -> Expectation:
        return self._then(super().create(), lambda new: self.told.update({new: ("", [])}))

    def load(self, sequence: Any, data: Any) -> Expectation:
        raise ValueError("hits after load are not modeled; checks judge them")

    def begin(self, tokens: Sequence[Any], salt: str = "") -> Expectation:
        entries, child = -(-len(tokens) // self.size), -1 - len(self.ids)
        if wrong := no_tokens(tokens):
            free = self.total - max(held.used() for held in self.ways)
            short = [("OutOfBlocks", "PREFIX-13")] if self.layers * entries > free else []  # it may check for room first
            return self.refuse(wrong + short)
        keys = self.chain(tokens[: max(0, len(tokens) - 1)], salt)

        def ways(held: OwnershipState) -> Iterable[Alternative]:
            assert isinstance(held, PrefixIndexState)
            listed = held.references()
            for path, lost in held.paths(keys):
                revived = sum(not listed[name] for names in path for name in names)

                def change(after: OwnershipState, path: Any = path, lost: Any = lost) -> None:
                    assert isinstance(after, PrefixIndexState)
                    after.begin(child, keys, path, lost, entries)

                yield Alternative(revived + self.layers * (entries - len(path)), change)

        found, used = outcome(self.ways, self.total, ways), set(self.ids)
        if not found.goes:
            return self.refuse([("OutOfBlocks", "PREFIX-13")])

        def change(new: int) -> None:
            self.ways = found.after
            for held in self.kept:
                held.tables[new], held.hits[new] = held.tables.pop(child), held.hits.pop(child)
            self._open(new, new, [LayerTable([]) for _ in range(self.layers)])
            self.told[new], self.begun[new], self.asked = (salt, []), list(tokens), list(tokens)
            self.written, self.touched = (new, -1, range(0)), {new}
            if len(self._hits(new)) == 1:
                self._seen(new, *self._hits(new))

        then, says = self.did("begin", change), f"an id never used before, not among {sorted(used)}"
        if found.stays:
            return NewOrRefused("PREFIX-01", then, kinds=("OutOfBlocks",), refused=self.none_left(found), says=says, used=used)
        return AnyOf("PREFIX-01", then, says=says, accepts=lambda id: id not in used)

    def _hits(self, sequence: int) -> set[int]:
        """Returns the possible hits of a sequence, in blocks."""
        return {held.hits[sequence] for held in self.kept if sequence in held.hits}

    def _seen(self, sequence: int, hit: int) -> None:
        """Records the observed hit of a sequence, in blocks."""
        self.ways = [held for held in self.kept if held.hits[sequence] == hit]
        salt, tokens = self.told[sequence][0], self.begun.pop(sequence)[: hit * self.size]
        self.told[sequence] = salt, tokens
        for key in self.chain(tokens, salt):
            for layer, rows in zip(self.sequences[sequence], self.rows[key], strict=True):
                layer.tokens += rows

    def commit(self, sequence: Any, tokens: Sequence[Any]) -> Expectation:
        wrong, known = self._unknown(sequence) + no_tokens(tokens), self.told.get(sequence, ("", []))
        wrong += not_in_range(len(tokens), self._shortest(sequence) + 1, "PositionOutOfRange", "PREFIX-02")
        if any(a != b for a, b in zip(tokens, known[1], strict=False)):
            wrong.append(("TokenMismatch", "PREFIX-02"))
        if wrong:
            return self.refuse(wrong)
        salt, told = known[0], [*tokens, *known[1][len(tokens) :]]
        first = len(known[1]) // self.size
        if first * self.size < self.first_position(sequence):
            raise ValueError("commit of released tokens is not modeled")
        keys = self.chain(told, salt)[first:]
        rows = {key: self._rows(sequence, first + at) for at, key in enumerate(keys)}
        if any(key in self.rows and not same(self.rows[key], each) for key, each in rows.items()):
            raise ValueError("commit of equal tokens with different keys or values is not modeled")

        def ways(held: OwnershipState) -> Iterable[Alternative]:
            assert isinstance(held, PrefixIndexState)
            for chosen in held.commits(sequence, first, keys):

                def change(after: OwnershipState, chosen: Any = chosen) -> None:
                    assert isinstance(after, PrefixIndexState)
                    after.commit(sequence, first, keys, chosen)

                yield Alternative(0, change)

        def change(ok: Any) -> None:
            self.settle(outcome(self.ways, self.total, ways).after if keys else self.ways)
            self.told[sequence] = salt, told
            self.rows = {key: each for key, each in self.rows.items() if key not in rows} | rows
            self.written, self.touched = (sequence, -1, range(0)), {sequence}

        return Expectation("PREFIX-02", self.did("commit", change))

    def match(self, tokens: Sequence[Any], salt: str = "") -> Expectation:
        if wrong := no_tokens(tokens):
            return self.refuse(wrong)
        if self.lost:
            return UnjudgedReply("PREFIX-01")
        keys = self.chain(tokens[: max(0, len(tokens) - 1)], salt)
        hits = {len(path) for held in self.kept for path, _ in held.paths(keys)}

        def then(got: int) -> None:
            if len(hits) > 1 or any(held.unsure for held in self.kept):
                self.ways = [held for held in self.kept if held.known(keys, got // self.size)]

        return self._hit(hits, tokens, salt, then)

    def _hit(self, hits: set[int], tokens: Sequence[int], salt: str, then: Callable[[Any], None]) -> Expectation:
        wanted = {hit * self.size for hit in hits}
        keys = self.chain(tokens, salt)

        def clause_of(got: Any) -> str:
            if not isinstance(got, int) or got < 0 or got % self.size or (got and got >= len(tokens)):
                return "PREFIX-01"
            if got > max(wanted):
                return self._too_much(keys[max(hits)])
            lost = keys[got // self.size]
            if self.last in ("none begun", "copied"):
                return {"none begun": "PREFIX-13", "copied": "PREFIX-14"}[self.last]
            copies = [names for held in self.kept for names in held.found.get(lost, [])]
            if len(copies) > len(self.kept):
                return "PREFIX-10"
            waits = any(name in held.released for held in self.kept for names in copies for name in names)
            return ("PREFIX-08" if self.last in TAKING else "PREFIX-06") if waits else "PREFIX-01"

        says = f"{' or '.join(map(str, sorted(wanted)))} tokens"
        return Hit("PREFIX-01", then, says=says, accepts=lambda got: got in wanted, clause_of=clause_of)

    def _too_much(self, key: Key) -> str:
        """Returns the clause that a hit on this block breaks."""
        if key in self.rows:
            return "PREFIX-07"
        if key in self.forgotten:
            return "PREFIX-11"
        salt, tokens = key
        begun = len(tokens) - self.size
        if any(told[0] == salt and tokens[: max(begun + 1, 1)] == tuple(told[1][: begun + 1]) for told in self.told.values()):
            return "PREFIX-04"
        return "PREFIX-03"

    def reset(self) -> Expectation:
        if self.sequences:
            return self.refuse([("InUse", "PREFIX-11")])

        def change(ok: Any) -> None:
            self.forgotten |= self.rows.keys()
            self.rows = {}
            for held in self.kept:
                held.found = {}
                held.forget()
            self.settle(self.ways)

        return Expectation("PREFIX-11", self.did("reset", change))

    def drop(self, sequence: Any) -> Expectation:
        def change(ok: Any) -> None:
            del self.told[sequence]
            for held in self.kept:
                held.in_order()

        return self._then(super().drop(sequence), change)

    def fork(self, sequence: Any) -> Expectation:
        def change(new: int) -> None:
            self.told[new] = self.told[sequence][0], list(self.told[sequence][1])

        return self._then(super().fork(sequence), change)

    def truncate(self, sequence: Any, length: Any) -> Expectation:
        def change(ok: Any) -> None:
            self._cut(sequence, length)
            for held in self.kept:
                held.time -= 1  # undo the step of the call itself
                held.in_order()

        return self._then(super().truncate(sequence, length), change)

    def release_before(self, sequence: Any, position: Any) -> Expectation:
        def change(ok: Any) -> None:
            for held in self.kept:
                held.in_order()

        return self._then(super().release_before(sequence, position), change)

    def remove(self, sequence: Any, start: Any, stop: Any, theta: Any = None, layout: Any = "halves") -> Expectation:
        expected = super().remove(sequence, start, stop, theta, layout)
        return self._then(expected, lambda ok: self._cut(sequence, start if start < stop else MOST_TOKEN))

    def write(self, sequence: Any, layer: Any, start: Any, keys: Any, values: Any) -> Expectation:
        expected = super().write(sequence, layer, start, keys, values)
        return self._then(expected, lambda ok: self._cut(sequence, start if len(keys) else MOST_TOKEN))

    def _cut(self, sequence: int, length: int) -> None:
        """Removes the committed tokens from position `length` on."""
        del self.told[sequence][1][length:]

    def length(self, sequence: Any, layer: Any) -> Expectation:
        began = sequence in self.begun or (self.last == "begin" and sequence in self.touched)
        if not began or not_in_range(layer, self.layers, "LayerOutOfRange"):
            return super().length(sequence, layer)
        salt, tokens = self.told[sequence][0], self.begun.get(sequence)
        if tokens is None:
            return self._hit({len(self.told[sequence][1]) // self.size}, self.asked, salt, lambda got: None)
        return self._hit(self._hits(sequence), tokens, salt, lambda got: self._seen(sequence, got // self.size))

    def gather(self, sequence: Any, layer: Any) -> Expectation:
        if sequence not in self.begun:
            return super().gather(sequence, layer)
        counts = {hit * self.size for hit in self._hits(sequence)}
        says = f"{' or '.join(map(str, sorted(counts)))} tokens"
        then = lambda got: self._seen(sequence, len(got[0]) // self.size)  # noqa: E731
        return AnyOf("PREFIX-01", then, says=says, accepts=lambda got: len(got[0]) in counts)

    def refuse(self, wrong: Wrong) -> ExpectedError:
        refused = super().refuse(wrong)
        if wrong[0][1] == "PREFIX-13":
            return replace(refused, refused=lambda: self.did("none begun")(None))
        return refused

    def _unknown(self, sequence: Any, layer: Any = 0) -> Wrong:
        if sequence in self.begun:
            raise ValueError("operations on a sequence before its hit was observed are not modeled")
        return super()._unknown(sequence, layer)

    def chain(self, tokens: Sequence[int], salt: str) -> list[Key]:
        """Returns the key of each full block."""
        return [(salt, tuple(tokens[:stop])) for stop in range(self.size, len(tokens) + 1, self.size)]

    def _rows(self, sequence: int, entry: int) -> list[list[Token]]:
        """Returns the tokens of a block in each layer."""
        return [layer.tokens[entry * self.size : (entry + 1) * self.size] for layer in self.sequences[sequence]]

    def _then(self, expected: Expectation, more: Callable[[Any], None]) -> Expectation:
        """Returns `expected` with a further change of the model on success."""

        def then(ok: Any) -> None:
            expected.then(ok)
            more(ok)

        return replace(expected, then=then)


TAKING = ("taken", "append", "begin", "fork", "remove")
