"""The reference model of the recurrent cache: per sequence the state after each of its tokens, and who has which checkpoint."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from kvref_conformance.families.recurrent.recurrence import PARTS, LayerState, State, product_and_bound, states_after, zero_state
from kvref_conformance.oracle.attention import U
from kvref_conformance.oracle.expectations import (
    AcceptedOrError,
    AnyOf,
    Errors,
    ExactValue,
    Expectation,
    ExpectedArrays,
    UnjudgedReply,
    all_finite,
    array_errors,
    exact_reads,
    finite_errors,
    id_errors,
    range_errors,
    to_float32,
)
from kvref_conformance.oracle.formats.per_row import ExpectedReads
from kvref_conformance.oracle.prompts import MAX_MATCHED, MOST_TOKEN, match_reads, token_errors
from kvref_conformance.oracle.reference_model import ReadCall
from kvref_conformance.oracle.saved_state import SerializableModel

SEEN = ("num_free_blocks", "length", "read_inputs", "read_matrix", "match")
CLAUSES = {
    "new": "RECUR-13", "create": "RECUR-06", "fork": "RECUR-07", "drop": "RECUR-13", "append": "RECUR-02", "batch": "RECUR-05",
    "padded batch": "RECUR-04", "checkpoint": "RECUR-10", "truncate": "RECUR-08", "draft": "RECUR-09", "begin": "RECUR-11",
    "commit": "RECUR-12", "reset": "RECUR-14", "no blocks": "RECUR-13", "save": "MOVE-04", "load": "RECUR-16",
    "load of nothing": "MOVE-07", "not loaded": "MOVE-03", "part": "RECUR-17",
}  # fmt: skip
Key = tuple[str, tuple[int, ...]]
Place = tuple[int, int]  # a layer and a head


@dataclass(frozen=True)
class StateParts:
    """Some layers and heads of a state. source: the state that they were saved from. states: the states at each length."""

    source: State
    states: Mapping[Place, list[LayerState]]

    @classmethod
    def of(cls, states: list[State], layers: Sequence[int], heads: Sequence[int]) -> "StateParts":
        return cls(
            states[-1], {(layer, head): [_head_of(state[layer], head) for state in states] for layer in layers for head in heads}
        )

    def joined(self, num_layers: int, num_heads: int) -> list[State]:
        """The whole state at each length."""
        layers = [
            [_join_heads(heads) for heads in zip(*(self.states[layer, head] for head in range(num_heads)), strict=True)]
            for layer in range(num_layers)
        ]
        return list(zip(*layers, strict=True))


def _head_of(state: LayerState, head: int) -> LayerState:
    return LayerState(state.inputs[:, head], state.matrix[head], state.error[head])


def _join_heads(heads: Sequence[LayerState]) -> LayerState:
    inputs = np.stack([each.inputs for each in heads], axis=1)
    return LayerState(inputs, np.stack([each.matrix for each in heads]), np.stack([each.error for each in heads]))


@dataclass(eq=False)
class Checkpoint:
    """A checkpoint: the states up to its length, the number of sequences that have it, and its keys in the index."""

    states: list[State]
    users: int = 1
    keys: list[Key] = field(default_factory=list)


@dataclass
class RecurrentSequence:
    """A sequence: the state at each length, salt and committed tokens, checkpoints by length, and the lengths of RECUR-09.

    parts: those of another state that are loaded, before the last one.
    """

    states: list[State]
    salt: str = ""
    tokens: list[int] = field(default_factory=list)
    checkpoints: dict[int, Checkpoint] = field(default_factory=dict)
    drafts: range = range(0)
    parts: StateParts | None = None

    @property
    def length(self) -> int:
        return len(self.states) - 1


class Recurrent(SerializableModel):
    family = "recurrent"
    room_errors = ("OutOfBlocks",)  # of a damaged part
    clause_by_observation: ClassVar = {
        **{(did, seen): clause for did, clause in CLAUSES.items() for seen in SEEN},
        **{("append", seen): "RECUR-01" for seen in ("length", "read_inputs")},
        **{(did, "num_free_blocks"): "RECUR-13" for did in ("create", "fork", "append", "checkpoint", "truncate", "begin")},
        **{(did, "match"): "RECUR-14" for did in ("create", "fork", "checkpoint", "begin", "drop", "truncate")},
    }

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.config: Mapping[str, Any] = config
        self.sequences: dict[int, RecurrentSequence] = {}
        self.ids: set[int] = set()
        self.index: dict[Key, list[Checkpoint]] = {}
        self.evictable: list[Checkpoint] = []  # the one released longest ago first
        self.seen: list[Key] = []  # committed prompts, the newest at the end
        self.any_order = self.unsure = False  # whether any cached checkpoint may be evicted, and whether one was

    def apply_limits(self, switch: Callable[[str], bool]) -> None:
        self.any_order = switch("other_eviction_order")

    def shape(self) -> Any:
        return {name: size for name, size in self.config.items() if name not in ("num_blocks", "max_drafts", "interval")}

    def observations(self) -> list[ReadCall]:
        found: list[ReadCall] = [("num_free_blocks", {})]
        for sequence in self.sequences:
            found.append(("length", {"sequence": sequence}))
            for layer in range(self.config["num_layers"]):
                found += [(name, {"sequence": sequence, "layer": layer}) for name in ("read_inputs", "read_matrix")]
        return found + ([] if self.unsure else match_reads(self.seen[-MAX_MATCHED:]))

    # Blocks.

    def used(self) -> int:
        owned = {id(each) for state in self.sequences.values() for each in state.checkpoints.values()}
        return len(self.sequences) + len(owned) + sum(state.parts is not None for state in self.sequences.values())

    def num_free_blocks(self) -> Expectation:
        return ExactValue(self.clause_of("num_free_blocks"), value=self.config["num_blocks"] - self.used())

    def missing_blocks(self, needed: int) -> Errors:
        return [("OutOfBlocks", "RECUR-13")] if self.used() + needed > self.config["num_blocks"] else []

    def no_blocks(self, wrong: Errors) -> Expectation:
        refused = self.expect_error(wrong)
        none_left = len(wrong) == 1 and wrong[0][0] == "OutOfBlocks"
        return replace(refused, on_error=lambda: self.on_success("no blocks")(None)) if none_left else refused

    def evict(self) -> None:
        """Evicts a cached checkpoint if there are more states than blocks, after one was added."""
        if self.used() + len(self.evictable) > self.config["num_blocks"]:
            self.unsure |= self.any_order and len(self.evictable) > 1
            for key in (evicted := self.evictable.pop(0)).keys:
                self.index[key].remove(evicted)

    def release(self, sequence: RecurrentSequence, lengths: Sequence[int]) -> None:
        for length in sorted(lengths, reverse=True):
            checkpoint = sequence.checkpoints.pop(length)
            checkpoint.users -= 1
            if not checkpoint.users and checkpoint.keys:
                self.evictable.append(checkpoint)

    def share(self, checkpoint: Checkpoint) -> None:
        checkpoint.users += 1
        self.evictable = [each for each in self.evictable if each is not checkpoint]

    # Sequences.

    def create(self) -> Expectation:
        return self._new("RECUR-06", "create", 1, lambda: RecurrentSequence([zero_state(self.config)]))

    def fork(self, sequence: Any) -> Expectation:
        if wrong := self._unknown(sequence):
            return self.expect_error(wrong + self.missing_blocks(1))
        parent = self.sequences[sequence]

        def copy() -> RecurrentSequence:
            for checkpoint in parent.checkpoints.values():
                self.share(checkpoint)
            return replace(
                parent,
                states=list(parent.states),
                tokens=list(parent.tokens),
                checkpoints=dict(parent.checkpoints),
                drafts=range(0),
                parts=None,
            )

        return self._new("RECUR-07", "fork", 1, copy)

    def begin(self, tokens: Sequence[Any], salt: str = "") -> Expectation:
        if wrong := token_errors(tokens):
            return self.expect_error(wrong + self.missing_blocks(1))
        hit, found = self._hit(tokens, salt)

        def found_sequence() -> RecurrentSequence:
            if found is None:
                return RecurrentSequence([zero_state(self.config)], salt)
            self.share(found)
            return RecurrentSequence(list(found.states), salt, list(tokens[:hit]), {hit: found})

        return self._new("RECUR-11", "begin", 1 + (found is not None and not found.users), found_sequence)

    def _new(self, clause: str, name: str, needed: int, make: Callable[[], RecurrentSequence]) -> Expectation:
        if wrong := self.missing_blocks(needed):
            return self.no_blocks(wrong)

        def change(new: int) -> None:
            self.sequences[new] = make()
            self.ids.add(new)
            self.evict()

        used = set(self.ids)
        says = f"an id never used before, not among {sorted(used)}"
        return AnyOf(clause, self.on_success(name, change), range_text=says, accepts=lambda id: id not in used)

    def drop(self, sequence: Any) -> Expectation:
        if wrong := self._unknown(sequence):
            return self.expect_error(wrong)

        def change(ok: Any) -> None:
            self.release(self.sequences[sequence], list(self.sequences[sequence].checkpoints))
            del self.sequences[sequence]

        return Expectation("RECUR-13", self.on_success("drop", change))

    def length(self, sequence: Any) -> Expectation:
        wrong = self._unknown(sequence)
        return self.expect_error(wrong) if wrong else ExactValue(self.clause_of("length"), value=self.sequences[sequence].length)

    def append(self, sequence: Any, **arrays: Any) -> Expectation:
        wrong = self._unknown(sequence) + self._array_errors((self.config["num_layers"], None), arrays)
        if wrong:
            return self.expect_error(wrong + finite_errors(*arrays.values()))
        tokens = {name: to_float32(each) for name, each in arrays.items()}
        then = self.on_success("append", lambda ok: self._append(sequence, tokens))
        return self._accepted("RECUR-01", then, [tokens])

    def append_batch(self, sequences: Sequence[Any], counts: Sequence[Any], **arrays: Any) -> Expectation:
        wrong = [each for sequence in sequences for each in self._unknown(sequence)]
        wrong += self._array_errors((self.config["num_layers"], len(sequences), None), arrays)
        width = max((np.shape(each)[2] for each in arrays.values() if np.ndim(each) == 5), default=0)
        wrong += [each for count in counts for each in range_errors(count, width + 1, "PositionOutOfRange", "RECUR-04")]
        wrong += [] if len(counts) == len(sequences) else [("ShapeMismatch", "LAW-10")]
        if wrong:
            return self.expect_error(wrong + finite_errors(*arrays.values()))
        if len(set(sequences)) < len(sequences):
            raise ValueError("a sequence that a batch names twice is not modeled")
        rows = [{name: to_float32(each[:, row, :count]) for name, each in arrays.items()} for row, count in enumerate(counts)]

        def change(ok: Any) -> None:
            for sequence, tokens in zip(sequences, rows, strict=True):
                self._append(sequence, tokens)

        name = "padded batch" if any(count < width for count in counts) else "batch"
        return self._accepted(CLAUSES[name], self.on_success(name, change), rows)

    def _accepted(self, clause: str, then: Callable[[Any], None], rows: list[dict[str, Any]]) -> Expectation:
        if all_finite(*(each for tokens in rows for each in tokens.values())):
            return Expectation(clause, then)
        return AcceptedOrError(clause, then, on_error=lambda: self.on_success("refused")(None))

    def _array_errors(self, first: Sequence[int | None], arrays: Mapping[str, Any]) -> Errors:
        sizes = {name: self.config[width] if width else 2 for name, width in PARTS.items()}
        return array_errors(*((arrays[name], (*first, self.config["num_heads"], sizes[name])) for name in PARTS))

    def _append(self, sequence: int, tokens: dict[str, Any]) -> None:
        state, count = self.sequences[sequence], tokens["keys"].shape[1]
        if count:
            start = state.length
            state.states += states_after(state.states[-1], tokens, self.config)
            state.drafts = range(max(start, state.length - self.config["max_drafts"]), state.length)

    def read_inputs(self, sequence: Any, layer: Any) -> Expectation:
        if wrong := self._unknown(sequence, layer):
            return self.expect_error(wrong)
        inputs = self.sequences[sequence].states[-1][layer].inputs
        return ExpectedArrays(self.clause_of("read_inputs"), parts=(exact_reads(inputs),))

    def read_matrix(self, sequence: Any, layer: Any) -> Expectation:
        if wrong := self._unknown(sequence, layer):
            return self.expect_error(wrong)
        state = self.sequences[sequence].states[-1][layer]
        with np.errstate(all="ignore"):
            slack = state.error + U * np.abs(state.matrix) * (state.error > 0)
            want = ExpectedReads(state.matrix.astype(np.float32), slack)
        unsure = ~np.isfinite(slack)
        return ExpectedArrays(
            self.clause_of("read_matrix"), parts=(want,), always_slack=True, undetermined=unsure if unsure.any() else None
        )

    def apply(self, sequence: Any, layer: Any, query: Any) -> Expectation:
        wrong = array_errors((query, (None, self.config["num_heads"], self.config["key_dim"])))
        if wrong := self._unknown(sequence, layer) + wrong:
            return self.expect_error(wrong)
        state, query = self.sequences[sequence].states[-1][layer], to_float32(query)
        want, bound = product_and_bound(state, query)
        if not all_finite(query) or not (np.isfinite(bound).all() and np.abs(want).max(initial=0) < 2.0**120):
            return UnjudgedReply("RECUR-02")
        part = ExpectedReads(want.astype(np.float32), bound + U * np.abs(want) * (bound > 0))
        return ExpectedArrays("RECUR-02", parts=(part,), always_slack=True)

    def checkpoint(self, sequence: Any) -> Expectation:
        if wrong := self._unknown(sequence):
            return self.expect_error(wrong + self.missing_blocks(1))
        state = self.sequences[sequence]
        new = state.length > 0 and state.length not in state.checkpoints
        if wrong := self.missing_blocks(1) if new else []:
            return self.no_blocks(wrong)

        def change(ok: Any) -> None:
            if new:
                state.checkpoints[state.length] = Checkpoint(list(state.states))
                self.evict()

        return Expectation("RECUR-10", self.on_success("checkpoint", change))

    def truncate(self, sequence: Any, length: Any) -> Expectation:
        longest = self.sequences[sequence].length if sequence in self.sequences else MOST_TOKEN
        wrong = self._unknown(sequence) + range_errors(length, longest + 1, "PositionOutOfRange", "RECUR-08")
        if wrong:
            return self.expect_error(wrong)
        state = self.sequences[sequence]

        def change(ok: Any) -> None:
            self.release(state, [each for each in state.checkpoints if each > length])
            del state.states[length + 1 :], state.tokens[length:]
            state.drafts = range(state.drafts.start, min(state.drafts.stop, length))

        kept = length in (0, state.length) or length in state.checkpoints
        if kept or length in state.drafts:
            name = "truncate" if kept else "draft"
            return Expectation(CLAUSES[name], self.on_success(name, change))
        refused = self.on_success("refused")
        kinds = ("NotTruncatable",)
        return AcceptedOrError("RECUR-08", self.on_success("truncate", change), kinds=kinds, on_error=lambda: refused(None))

    # The prefix index.

    def match(self, tokens: Sequence[Any], salt: str = "") -> Expectation:
        if wrong := token_errors(tokens):
            return self.expect_error(wrong)
        clause = "RECUR-11" if self.last_change not in CLAUSES else self.clause_of("match")
        return ExactValue(clause, value=self._hit(tokens, salt)[0])

    def _hit(self, tokens: Sequence[int], salt: str) -> tuple[int, Checkpoint | None]:
        """The hit, and the checkpoint that was committed first."""
        if self.unsure:
            raise ValueError("hits are not modeled while the evicted checkpoints are not known")
        interval = self.config["interval"]
        for length in range((len(tokens) - 1) // interval * interval, 0, -interval):
            if found := self.index.get((salt, tuple(tokens[:length]))):
                return length, found[0]
        return 0, None

    def commit(self, sequence: Any, tokens: Sequence[Any]) -> Expectation:
        wrong = self._unknown(sequence) + token_errors(tokens)
        state = self.sequences.get(sequence, RecurrentSequence([()]))
        wrong += range_errors(len(tokens), state.length + 1, "PositionOutOfRange", "RECUR-12")
        if any(a != b for a, b in zip(tokens, state.tokens, strict=False)):
            wrong.append(("TokenMismatch", "RECUR-12"))
        if wrong:
            return self.expect_error(wrong)

        def change(ok: Any) -> None:
            state.tokens = [*tokens, *state.tokens[len(tokens) :]]
            for length, checkpoint in sorted(state.checkpoints.items()):
                key = state.salt, tuple(state.tokens[:length])
                if length % self.config["interval"] == 0 and length <= len(state.tokens) and key not in checkpoint.keys:
                    self.index.setdefault(key, []).append(checkpoint)
                    checkpoint.keys.append(key)
            prompt = state.salt, tuple(state.tokens)
            self.seen = [*(each for each in self.seen if each != prompt), prompt]

        return Expectation("RECUR-12", self.on_success("commit", change))

    def reset(self) -> Expectation:
        if self.sequences:
            return self.expect_error([("InUse", "RECUR-14")])

        def change(ok: Any) -> None:
            self.index, self.evictable, self.unsure = {}, [], False

        return Expectation("RECUR-14", self.on_success("reset", change))

    # Files.

    def save(self, sequence: Any, layers: Any = None, heads: Any = None) -> Expectation:
        num_layers, num_heads = self.config["num_layers"], self.config["num_heads"]
        wrong = self._unknown(sequence) + span_errors(layers, num_layers, "LayerOutOfRange")
        if wrong := wrong + span_errors(heads, num_heads, "HeadOutOfRange"):
            return self.expect_error(wrong)
        states, spans = self.sequences[sequence].states, [range(*(layers or [num_layers])), range(*(heads or [num_heads]))]
        if [len(span) for span in spans] == [num_layers, num_heads]:
            return self.expect_save(list(states), empty=len(states) == 1)
        return self.expect_save(StateParts.of(states, *spans), empty=False)

    def load(self, sequence: Any, data: Any) -> Expectation:
        wrong, found = self._unknown(sequence), self.saved_states.get(np.asarray(data).tobytes())
        if wrong or found is None or (found.family, found.shape) != (self.family, self.shape()):
            return self.expect_load(data, wrong, lambda content: None)
        if isinstance(found.content, StateParts):
            return self._load_part(self.sequences[sequence], found.content)
        return self.expect_load(data, wrong, lambda states: self._replace(self.sequences[sequence], states))

    def _load_part(self, state: RecurrentSequence, new: StateParts) -> Expectation:
        earlier, sizes = state.parts, (self.config["num_layers"], self.config["num_heads"])
        if earlier is None and (wrong := self.missing_blocks(1)):
            return self.no_blocks(wrong)
        states = {**(earlier.states if earlier else {}), **new.states}
        overlap = earlier is not None and len(states) < len(earlier.states) + len(new.states)
        if overlap or len({len(each) for each in states.values()}) > 1:
            return self.expect_error([("ConfigError", "RECUR-17")])

        def change(ok: Any) -> None:
            loaded = StateParts(new.source, states)
            if len(states) == sizes[0] * sizes[1]:
                self._replace(state, loaded.joined(*sizes))
            else:
                state.parts = loaded
                self.evict()

        then = self.on_success("part", change)
        if earlier is None or earlier.source is new.source:
            return Expectation("RECUR-17", then)
        return AcceptedOrError("RECUR-17", then, kinds=("ConfigError",), on_error=lambda: self.note_unchanged("refused"))

    def _replace(self, state: RecurrentSequence, states: list[State]) -> None:
        self.release(state, list(state.checkpoints))
        state.states, state.tokens, state.drafts, state.parts = list(states), [], range(0), None

    def _unknown(self, sequence: Any, layer: Any = 0) -> Errors:
        return id_errors(sequence, self.sequences) + range_errors(layer, self.config["num_layers"], "LayerOutOfRange")


def span_errors(span: Any, stop: int, kind: str) -> Errors:
    """The error of this kind, unless `span` is None or a range within [0, stop)."""
    if span is None:
        return []
    start, end = span
    return range_errors(end, stop + 1, kind, "RECUR-17") or range_errors(start, end + 1, kind, "RECUR-17")
