"""The reference model of the prefix cache: the paged model, and a dict of committed blocks by salt and tokens."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from kvref_conformance.families.paged.model import NewOrRefused, Paged
from kvref_conformance.families.paged.ownership_model import Alternative, OwnershipState, outcome
from kvref_conformance.families.paged.table_model import LayerTable, Token
from kvref_conformance.families.prefix.prefix_index_model import (
    Found,
    Hit,
    Key,
    Label,
    PrefixIndexState,
    follows,
    same_bits,
    start_of,
)
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.oracle.expectations import (
    AnyOf,
    Errors,
    Expectation,
    ExpectedArrays,
    ExpectedError,
    UnjudgedReply,
    range_errors,
)
from kvref_conformance.oracle.prompts import LAST_TOKEN, MAX_MATCHED, MOST_TOKEN, token_errors
from kvref_conformance.oracle.reference_model import ReadCall


class Prefix(Paged):
    family = "prefix"
    clause_by_observation: ClassVar = Paged.clause_by_observation | {
        **{("begin", seen): "PREFIX-01" for seen in ("num_free_blocks", "length", "block_table")},
        **{("commit", seen): "PREFIX-10" for seen in ("num_free_blocks", "length", "block_table")},
        ("none begun", "num_free_blocks"): "PREFIX-13", ("none begun", "block_table"): "PREFIX-13",
        ("reset", "num_free_blocks"): "PREFIX-11",
    }  # fmt: skip

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        state = PrefixIndexState(self.layers)
        state.total, state.size = self.total, self.size
        self.ways: list[OwnershipState] = [state]
        self.committed: dict[int, tuple[Label, list[int]]] = {}  # sequence -> (label, committed tokens)
        self.unobserved: dict[int, list[int]] = {}  # sequence -> its prompt, while its hit was not observed
        self.last_prompt: list[int] = []  # the last prompt
        self.rows: dict[Key, list[list[Token]]] = {}  # committed block -> its tokens in each layer, since the last reset
        self.not_added: Key | None = None  # the last block that was released when its tokens were committed
        self.reset_keys: set[Key] = set()  # blocks that were committed before the last reset

    def apply_limits(self, switch: Callable[[str], bool]) -> None:
        super().apply_limits(switch)
        for state in self.states:
            state.any_order, state.token_hits = switch("other_eviction_order"), switch("token_hits")

    @property
    def token_hits(self) -> bool:
        """Whether hits contain tokens after their full blocks (PREFIX-19)."""
        return self.states[0].token_hits

    @property
    def states(self) -> list[PrefixIndexState]:
        return [state for state in self.ways if isinstance(state, PrefixIndexState)]

    @property
    def must_be_read(self) -> bool:
        return bool(self.unobserved)

    def observations(self) -> list[ReadCall]:
        """Returns the observations of the paged cache (lengths only of changed sequences), and the match of the last prompts."""
        found: list[ReadCall] = [
            ("length", {"sequence": sequence, "layer": layer})
            for sequence in self.sequences
            for layer in range(self.layers)
            if sequence in self.touched
        ]
        found += [look for look in super().observations() if look[0] not in ("length", "utilization")]
        longest = [key for key in self.rows if not any(follows(other, key) for other in self.rows)]
        longest = longest[-MAX_MATCHED:] + ([self.not_added] if self.not_added else [])
        return found + [_match_read(*key) for key in longest]

    def create(self) -> Expectation:
        return self._then(super().create(), lambda new: self.committed.update({new: (Label(""), [])}))

    def load(self, sequence: Any, data: Any) -> Expectation:
        raise ValueError("hits after load are not modeled; checks judge them")

    def begin(self, tokens: Sequence[Any], salt: str = "", adapter: str = "", media: Sequence[Any] = ()) -> Expectation:
        entries, child = -(-len(tokens) // self.size), -1 - len(self.ids)
        if wrong := token_errors(tokens, "PREFIX-15") + media_errors(media, len(tokens)):
            free = self.total - max(state.used() for state in self.ways)
            short = [("OutOfBlocks", "PREFIX-13")] if self.layers * entries > free else []  # it may check for room first
            return self.expect_error(wrong + short)
        label = Label(salt, adapter, tuple(map(tuple, media)))
        prompt = _prompt(tokens, label)
        self._require_equal_sources(prompt)

        def ways(state: OwnershipState) -> Iterable[Alternative]:
            assert isinstance(state, PrefixIndexState)
            listed = state.references()
            for hit in state.possible_hits(prompt):
                revived = sum(not listed[name] for names in hit.path for name in names)

                def change(after: OwnershipState, hit: Found = hit) -> None:
                    assert isinstance(after, PrefixIndexState)
                    after.begin(child, hit, entries)

                yield Alternative(revived + self.layers * (entries - len(hit.path)), change)

        found, used = outcome(self.ways, self.total, ways), set(self.ids)
        if not found.goes:
            return self.expect_error([("OutOfBlocks", "PREFIX-13")])

        def change(new: int) -> None:
            self.ways = found.after
            for state in self.states:
                state.tables[new], state.hits[new] = state.tables.pop(child), state.hits.pop(child)
            self._open(new, new, [LayerTable([]) for _ in range(self.layers)])
            self.committed[new], self.unobserved[new], self.last_prompt = (label, []), list(tokens), list(tokens)
            self.written, self.touched = (new, -1, range(0)), {new}
            if len(self._hits(new)) == 1:
                self._observe_hit(new, *self._hits(new))

        then, says = self.on_success("begin", change), f"an id never used before, not among {sorted(used)}"
        if found.stays:
            return NewOrRefused("PREFIX-01", then, kinds=("OutOfBlocks",), on_error=self.none_left(found), says=says, used=used)
        return AnyOf("PREFIX-01", then, range_text=says, accepts=lambda id: id not in used)

    def _hits(self, sequence: int) -> set[int]:
        """Returns the possible hits of a sequence."""
        return {state.hits[sequence] for state in self.states if sequence in state.hits}

    def _observe_hit(self, sequence: int, hit: int) -> None:
        """Records the observed hit of a sequence."""
        self.ways = [state for state in self.states if state.hits[sequence] == hit]
        label, tokens = self.committed[sequence][0], self.unobserved.pop(sequence)[:hit]
        self.committed[sequence] = label, tokens
        parts = [self.rows[key] for key in self.chain(tokens, label)]
        if hit % self.size:  # the tokens that were copied
            parts.append(next(iter(self._sources((label, tuple(tokens))))))
        for rows_of_each_layer in parts:
            for layer, rows in zip(self.sequences[sequence], rows_of_each_layer, strict=True):
                layer.tokens += rows

    def _sources(self, prompt: Key) -> Iterable[list[list[Token]]]:
        """Returns the last tokens of a prompt, which do not fill a block, as each block contains them that begins with them."""
        length = len(prompt[1])
        stop, wanted = -(-length // self.size) * self.size, start_of(prompt, length)
        found = (rows for key, rows in self.rows.items() if len(key[1]) == stop and start_of(key, length) == wanted)
        return ([layer[: length % self.size] for layer in rows] for rows in found)

    def _require_equal_sources(self, prompt: Key) -> None:
        """Raises ValueError if the tokens of a hit depend on which block is copied."""
        for length in {state.length_of(found) for state in self.states for found in state.possible_hits(prompt) if found.rest}:
            first, *others = self._sources(start_of(prompt, length))
            if not all(same_bits(first, other) for other in others):
                raise ValueError("begin with blocks of equal tokens and different keys or values is not modeled")

    def commit(self, sequence: Any, tokens: Sequence[Any]) -> Expectation:
        wrong, (label, old) = (
            self._unknown(sequence) + token_errors(tokens, "PREFIX-15"),
            self.committed.get(sequence, (Label(""), [])),
        )
        if not self.tables_alone:
            wrong += range_errors(len(tokens), self._shortest(sequence) + 1, "PositionOutOfRange", "PREFIX-02")
        if any(a != b for a, b in zip(tokens, old, strict=False)):
            wrong.append(("TokenMismatch", "PREFIX-02"))
        if wrong:
            return self.expect_error(wrong)
        new = [*tokens, *old[len(tokens) :]]
        first = max(len(old), self.first_position(sequence)) // self.size  # a released block is not added
        keys = self.chain(new, label)[first:]
        rows = {key: self._rows(sequence, first + at) for at, key in enumerate(keys)}
        if any(key in self.rows and not same_bits(self.rows[key], each) for key, each in rows.items()):
            raise ValueError("commit of equal tokens with different keys or values is not modeled")

        def ways(state: OwnershipState) -> Iterable[Alternative]:
            assert isinstance(state, PrefixIndexState)
            for chosen in state.commits(sequence, first, keys):

                def change(after: OwnershipState, chosen: Any = chosen) -> None:
                    assert isinstance(after, PrefixIndexState)
                    after.commit(sequence, first, keys, chosen)

                def without_orphans(after: OwnershipState, change: Any = change) -> None:
                    assert isinstance(after, PrefixIndexState)
                    change(after)
                    after.evict_orphans()

                yield Alternative(0, change)
                if len(old) < first * self.size and keys:  # a block before them may be missing (PREFIX-09)
                    yield Alternative(0, without_orphans)

        def change(ok: Any) -> None:
            self.settle(outcome(self.ways, self.total, ways).after if keys else self.ways)
            self.committed[sequence] = label, new
            if len(old) < first * self.size <= len(new):
                self.not_added = label.before(first * self.size), tuple(new[: first * self.size])
            self.rows = {key: each for key, each in self.rows.items() if key not in rows} | rows
            self.written, self.touched = (sequence, -1, range(0)), {sequence}

        return Expectation("PREFIX-02", self.on_success("commit", change))

    def match(self, tokens: Sequence[Any], salt: str = "", adapter: str = "", media: Sequence[Any] = ()) -> Expectation:
        if wrong := token_errors(tokens, "PREFIX-15") + media_errors(media, len(tokens)):
            return self.expect_error(wrong)
        if self.lost:
            return UnjudgedReply("PREFIX-01")
        label = Label(salt, adapter, tuple(map(tuple, media)))
        prompt = _prompt(tokens, label)
        hits = {state.length_of(found) for state in self.states for found in state.possible_hits(prompt)}

        def then(got: int) -> None:
            if len(hits) > 1 or any(state.unsure for state in self.states):
                self.ways = [state for state in self.states if state.observe_hit(prompt, got)]

        return self._hit(hits, tokens, label, then)

    def _hit(self, hits: set[int], tokens: Sequence[int], label: Label, then: Callable[[Any], None]) -> Expectation:
        keys, most = self.chain(tokens, label), max(hits)

        def clause_of(got: Any) -> str:
            unit = 1 if self.token_hits else self.size
            if not isinstance(got, int) or got < 0 or got % unit or (got and got >= len(tokens)):
                return "PREFIX-19" if self.token_hits else "PREFIX-01"
            if got // self.size == most // self.size:
                return "PREFIX-19"
            if got > most:
                return self._clause_of_excess(keys[most // self.size])
            lost = keys[got // self.size]
            if self.last_change in ("none begun", "copied"):
                return {"none begun": "PREFIX-13", "copied": "PREFIX-14"}[self.last_change]
            copies = [names for state in self.states for names in state.index.get(lost, [])]
            if len(copies) > len(self.states):
                return "PREFIX-10"
            if any(name in state.evictable for state in self.states for names in copies for name in names):
                return "PREFIX-08" if self.last_change in ALLOCATING else "PREFIX-06"
            return "PREFIX-18" if label.media else "PREFIX-17" if label.adapter else "PREFIX-01"

        says = f"{' or '.join(map(str, sorted(hits)))} tokens"
        return Hit("PREFIX-01", then, range_text=says, accepts=lambda got: got in hits, clause_of=clause_of)

    def _clause_of_excess(self, key: Key) -> str:
        """Returns the clause that a hit on this block breaks."""
        if not self.rows and not self.reset_keys:
            return "PREFIX-04"  # no block was ever committed, so it cannot be taken for another one
        if key in self.rows:
            return "PREFIX-07"
        if key in self.reset_keys:
            return "PREFIX-11"
        label, tokens = key
        count = len(tokens) - self.size + 1
        if any(
            label == other.before(len(tokens)) and tokens[: max(count, 1)] == tuple(old[:count])
            for other, old in self.committed.values()
        ):
            return "PREFIX-04"
        for other in (other for other, same in (*self.rows, *self.reset_keys) if same == tokens):
            if label.media != other.media and label[:2] == other[:2]:
                return "PREFIX-18"
            if label.adapter != other.adapter and label.media == other.media:
                return "PREFIX-17"
        return "PREFIX-03"

    def reset(self) -> Expectation:
        if self.sequences:
            return self.expect_error([("InUse", "PREFIX-11")])

        def change(ok: Any) -> None:
            self.reset_keys |= self.rows.keys()
            self.rows = {}
            for state in self.states:
                state.index = {}
                state.forget()
            self.settle(self.ways)

        return Expectation("PREFIX-11", self.on_success("reset", change))

    def drop(self, sequence: Any) -> Expectation:
        def change(ok: Any) -> None:
            del self.committed[sequence]
            for state in self.states:
                state.order_released()

        return self._then(super().drop(sequence), change)

    def fork(self, sequence: Any) -> Expectation:
        def change(new: int) -> None:
            self.committed[new] = self.committed[sequence][0], list(self.committed[sequence][1])

        return self._then(super().fork(sequence), change)

    def truncate(self, sequence: Any, length: Any) -> Expectation:
        def change(ok: Any) -> None:
            self._cut(sequence, length)
            for state in self.states:
                state.time -= 1  # undo the step of the call itself
                state.order_released()

        return self._then(super().truncate(sequence, length), change)

    def release_before(self, sequence: Any, position: Any) -> Expectation:
        def change(ok: Any) -> None:
            for state in self.states:
                state.time += 1  # of the blocks that it released, any one can be evicted first (PREFIX-08)

        return self._then(super().release_before(sequence, position), change)

    def remove(self, sequence: Any, start: Any, stop: Any, frequencies: Any = None, layout: Any = "halves") -> Expectation:
        expected = super().remove(sequence, start, stop, frequencies, layout)
        return self._then(expected, lambda ok: self._cut(sequence, start if start < stop else MOST_TOKEN))

    def write(self, sequence: Any, layer: Any, start: Any, keys: Any, values: Any) -> Expectation:
        layers = self.sequences.get(sequence, [])
        overwrites = len(keys) > 0 and not range_errors(layer, len(layers), "") and start < len(layers[layer].tokens)
        expected = super().write(sequence, layer, start, keys, values)
        return self._then(expected, lambda ok: self._cut(sequence, start if overwrites else MOST_TOKEN))

    def _cut(self, sequence: int, length: int) -> None:
        """Removes the committed tokens and the media from position `length` on."""
        label, tokens = self.committed[sequence]
        self.committed[sequence] = label.before(length), tokens[:length]

    def length(self, sequence: Any, layer: Any) -> Expectation:
        is_new = sequence in self.unobserved or (self.last_change == "begin" and sequence in self.touched)
        if not is_new or range_errors(layer, self.layers, "LayerOutOfRange"):
            return super().length(sequence, layer)
        label, tokens = self.committed[sequence][0], self.unobserved.get(sequence)
        if tokens is None:
            return self._hit({len(self.committed[sequence][1])}, self.last_prompt, label, lambda got: None)
        return self._hit(self._hits(sequence), tokens, label, lambda got: self._observe_hit(sequence, got))

    def gather(self, sequence: Any, layer: Any) -> Expectation:
        if sequence not in self.unobserved:
            return super().gather(sequence, layer)
        counts = self._hits(sequence)
        says = f"{' or '.join(map(str, sorted(counts)))} tokens"
        then = lambda got: self._observe_hit(sequence, len(got[0]))  # noqa: E731
        return AnyOf("PREFIX-01", then, range_text=says, accepts=lambda got: len(got[0]) in counts)

    def _tokens(self, sequence: int, layer: int, positions: list[int] | None) -> Expectation:
        expected = super()._tokens(sequence, layer, positions)
        first = len(self.committed[sequence][1]) // self.size * self.size  # of the copied tokens
        if not (self.token_hits and self.last_change == "begin" and sequence in self.touched):
            return expected
        assert isinstance(expected, ExpectedArrays)
        others = expected.clause_at

        def clause_at(index: tuple[int, ...], got: NDArray) -> str:
            position = index[0] if positions is None else positions[index[0]]
            return "PREFIX-19" if position >= first or others is None else others(index, got)

        return replace(expected, clause_at=clause_at)

    def expect_error(self, wrong: Errors) -> ExpectedError:
        refused = super().expect_error(wrong)
        if wrong[0][1] == "PREFIX-13":
            return replace(refused, on_error=lambda: self.note_unchanged("none begun"))
        return refused

    def _unknown(self, sequence: Any, layer: Any = 0) -> Errors:
        if sequence in self.unobserved:
            raise ValueError("operations on a sequence before its hit was observed are not modeled")
        return super()._unknown(sequence, layer)

    def chain(self, tokens: Sequence[int], label: Label) -> list[Key]:
        """Returns the key of each full block."""
        return self.states[0].chain((label, tuple(tokens)))

    def _rows(self, sequence: int, entry: int) -> list[list[Token]]:
        """Returns the tokens of a block in each layer."""
        return [layer.tokens[entry * self.size : (entry + 1) * self.size] for layer in self.sequences[sequence]]

    def _then(self, expected: Expectation, more: Callable[[Any], None]) -> Expectation:
        """Returns `expected` with a further change of the model on success."""

        def then(ok: Any) -> None:
            expected.on_result(ok)
            more(ok)

        return replace(expected, on_result=then)


def _prompt(tokens: Sequence[int], label: Label) -> Key:
    """A prompt without its last token, which is never part of a hit."""
    return label, tuple(tokens[: max(0, len(tokens) - 1)])


def media_errors(media: Sequence[Sequence[Any]], num_tokens: int) -> Errors:
    """The errors of media that are not in the order of positions, or not within the tokens."""
    bounds = [position for start, stop, _ in media for position in (start, stop)]
    integers = all(isinstance(position, int) for position in bounds)
    ordered = integers and all(start < stop for start, stop, _ in media) and bounds == sorted(bounds)
    inside = not bounds or (integers and min(bounds) >= 0 and max(bounds) <= num_tokens)
    return [] if ordered and inside else [("PositionOutOfRange", "PREFIX-18")]


def _match_read(label: Label, tokens: tuple[int, ...]) -> ReadCall:
    """The call of `match` that finds the blocks of a committed prompt."""
    more = {"adapter": label.adapter, "media": [list(item) for item in label.media]}
    given = {name: value for name, value in more.items() if value}
    return "match", {"tokens": [*tokens, LAST_TOKEN], "salt": label.salt} | given


ALLOCATING = ("taken", "append", "begin", "fork", "remove")
