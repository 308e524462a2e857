"""A recurrent cache that serves sequences of computed content. States and the number of free blocks are known independently.

The key of the token at position t has a single 1, at place t % key_dim, and all gates are 1. A value is an integer that is
computed from stream and position: row r of a matrix is the value of the last token t with t % key_dim == r. SSD adds, so that
the value that is appended is less the value of the token whose row it replaces.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.families.prefix.soak_driver import APART
from kvref_conformance.families.recurrent.recurrence import PARTS, Tokens
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.soak.cache_workload import WorkloadEvent
from kvref_conformance.testlib.assertions import assert_equal, assert_same, assert_true, raises
from kvref_conformance.testlib.fixtures import new_object
from kvref_conformance.testlib.tagged_content import KEYS, MAX_EDITS, PREFIXES, VALUES, SequenceContent, token_content

CHUNK = 512  # tokens of an append
SPARE = 8  # blocks that checkpoints leave free, for new sequences


def whole_content(streams: NDArray, layer: int, places: NDArray, heads: int, dim: int) -> NDArray:
    """Values that identify their place: integers other than 0 in [-128, 129), so that bfloat16 represents their differences."""
    content = token_content(streams, layer, places, heads, dim, VALUES)
    mantissas = (content.view(np.uint32) >> np.uint32(16)) & np.uint32(127)
    return np.sign(content) * (1 + mantissas).astype(np.float32)


@dataclass
class SoakState:
    """A sequence: its id in the cache, its content and its length.

    checkpoints: by length, a number of the checkpoint, which other sequences that have it have too. drafts: lengths of RECUR-09.
    shared: how many of its tokens are a shared prefix. committed: how many are committed.
    """

    id: int
    content: SequenceContent
    length: int = 0
    checkpoints: dict[int, int] = field(default_factory=dict)
    drafts: range = range(0)
    shared: int = 0
    committed: int = 0

    def found_at(self, content: SequenceContent) -> list[int]:
        """The lengths at which `begin` must find a checkpoint of this sequence for a request with this content."""
        most = min(self.shared, self.committed) if self.content.runs[0].stream == content.runs[0].stream else 0
        return [length for length in self.checkpoints if length <= most]


class SoakRecurrentCache:
    """Sequences in a recurrent cache. Each has a number, counted from 0, which is its stream of content."""

    def __init__(self, subject: Subject, **sizes: Any) -> None:
        self.subject, self.cache = subject, new_object(subject, "recurrent", **sizes)
        self.config = self.cache.config
        self.layers, self.interval = range(self.config["num_layers"]), int(self.config["interval"])
        self.most = subject.size("tokens", CHUNK)
        self.live: dict[int, SoakState] = {}
        self.num_checkpoints = self.num_created = 0

    @property
    def free(self) -> int:
        """The number of free blocks (RECUR-13)."""
        owned = {checkpoint for each in self.live.values() for checkpoint in each.checkpoints.values()}
        return int(self.config["num_blocks"]) - len(self.live) - len(owned)

    def create(self, number: int | None = None, content: SequenceContent | None = None) -> int:
        number = self.num_created if number is None else number
        self._add(number, self.cache.create(), content or SequenceContent(number))
        return number

    def _add(self, number: int, id: int, content: SequenceContent) -> SoakState:
        assert_true(id not in {each.id for each in self.live.values()}, "the id of a new sequence", "an id not in use", id)
        self.live[number] = SoakState(id, content)
        self.num_created = max(self.num_created, number + 1)
        return self.live[number]

    def token_ids(self, content: SequenceContent, count: int) -> list[int]:
        """The tokens of a request: they differ by position and stream."""
        streams, places = content.at(range(count))
        found: list[int] = (streams * APART + places).tolist()
        return found

    def begin(self, number: int, count: int, content: SequenceContent, shared: int) -> None:
        """Begins a request of `count` tokens, of which the first `shared` ones are a prefix, and checks its hit."""
        most = min(shared, count - 1) // self.interval * self.interval
        owners = [(each, other) for other in self.live.values() for each in other.found_at(content) if each <= most]
        least, tokens, found = max((each for each, _ in owners), default=0), self.token_ids(content, count), None
        with suppress(NotOffered):
            found = self.cache.match(tokens)
        one = self._add(number, self.cache.begin(tokens), content)
        one.length = one.committed = int(self.cache.length(one.id))
        one.shared = shared
        right = least <= one.length <= most and one.length % self.interval == 0
        says = f"a multiple of {self.interval}, at least {least} and at most {most}"
        assert_true(right, f"the hit of sequence {number}", says, one.length)
        if found is not None:
            assert_equal(one.length, found, f"the hit of sequence {number}, which match returned just before")
        if one.length:
            owner = next((other for each, other in owners if each == one.length), None)
            one.checkpoints[one.length] = owner.checkpoints[one.length] if owner else self._new_checkpoint()

    def _new_checkpoint(self) -> int:
        self.num_checkpoints += 1
        return self.num_checkpoints

    def tokens(self, one: SoakState, count: int) -> Tokens:
        """The next tokens of a sequence, [num_layers, count, num_heads, ...]."""
        config, heads = self.config, self.config["num_heads"]
        positions = np.arange(one.length, one.length + count)
        here, before = one.content.at(positions), one.content.at(np.maximum(0, positions - config["key_dim"]))
        replaces = (positions >= config["key_dim"])[:, None, None] & (not config["delta_rule"])
        keys = np.zeros((len(self.layers), count, heads, config["key_dim"]), np.float32)
        keys[:, np.arange(count), :, positions % config["key_dim"]] = 1
        inputs, values = [], []
        for layer in self.layers:
            inputs.append(token_content(here[0], layer, here[1], heads, config["channels"], KEYS))
            new, old = (whole_content(streams, layer, at, heads, config["value_dim"]) for streams, at in (here, before))
            values.append(new - replaces * old)
        gates = np.ones((*keys.shape[:-1], 2), np.float32)
        return {"inputs": np.stack(inputs), "keys": keys, "values": np.stack(values), "gates": gates}

    def append(self, number: int, count: int) -> None:
        one = self.live[number]
        for start in range(0, count, self.most):
            part = min(self.most, count - start)
            self.cache.append(one.id, **self.tokens(one, part))
            self._appended(one, part)

    def append_batch(self, numbers: Sequence[int], counts: Sequence[int]) -> None:
        """Appends to several sequences; padding is NaN."""
        ones, width = [self.live[number] for number in numbers], max(counts)
        shape = len(self.layers), len(ones), width, self.config["num_heads"]
        arrays = {name: np.full((*shape, self.config[size] if size else 2), np.nan, np.float32) for name, size in PARTS.items()}
        for row, (one, count) in enumerate(zip(ones, counts, strict=True)):
            for name, each in self.tokens(one, count).items():
                arrays[name][:, row, :count] = each
        self.cache.append_batch([one.id for one in ones], list(counts), **arrays)
        for one, count in zip(ones, counts, strict=True):
            self._appended(one, count)

    def _appended(self, one: SoakState, count: int) -> None:
        if count:
            start, one.length = one.length, one.length + count
            one.drafts = range(max(start, one.length - self.config["max_drafts"]), one.length)

    def keep(self, number: int) -> None:
        """Takes a checkpoint of a sequence and commits its tokens."""
        self.checkpoint(number)
        with suppress(NotOffered):
            self.commit(number)

    def checkpoint(self, number: int) -> None:
        one = self.live[number]
        self.cache.checkpoint(one.id)
        if one.length and one.length not in one.checkpoints:
            one.checkpoints[one.length] = self._new_checkpoint()

    def commit(self, number: int) -> None:
        one = self.live[number]
        self.cache.commit(one.id, self.token_ids(one.content, one.length))
        one.committed = one.length

    def truncate(self, number: int, length: int) -> None:
        """Truncates to 0, to a checkpoint or to a draft. Tokens that are appended later differ from those that are removed."""
        one = self.live[number]
        self.cache.truncate(one.id, length)
        one.checkpoints = {at: checkpoint for at, checkpoint in one.checkpoints.items() if at <= length}
        one.content.truncate(length)
        one.drafts = range(one.drafts.start, min(one.drafts.stop, length))
        one.length, one.shared, one.committed = length, min(one.shared, length), min(one.committed, length)

    def drop(self, number: int) -> None:
        self.cache.drop(self.live[number].id)
        del self.live[number]

    def fork(self, number: int, child: int) -> None:
        one = self.live[number]
        made = self._add(child, self.cache.fork(one.id), one.content.fork(child, one.length))
        self.live[child] = replace(one, id=made.id, content=made.content, checkpoints=dict(one.checkpoints), drafts=range(0))

    def move(self, number: int) -> None:
        """Saves a sequence, loads it into a new one, and drops the old one."""
        one = self.live[number]
        data, new = self.cache.as_is("save", one.id), int(self.cache.create())
        try:
            self.cache.load(new, data)
        except NotOffered:
            self.cache.drop(new)
            raise
        self.cache.drop(one.id)
        self.live[number] = SoakState(new, one.content, one.length)

    def refuse(self, number: int) -> None:
        """Calls for which there is no block: it creates sequences until none is free. Each has to change nothing."""
        one, sequences = self.live[number], [self.cache.create() for _ in range(self.free)]
        with suppress(NotOffered):
            assert_equal(int(self.cache.num_free_blocks), 0, "free blocks after creates until none is free")
        for name, arguments in (("create", ()), ("fork", (one.id,)), ("checkpoint", (one.id,))):
            if name != "checkpoint" or (one.length and one.length not in one.checkpoints):
                with suppress(NotOffered), raises("OutOfBlocks"):
                    getattr(self.cache, name)(*arguments)
        for sequence in sequences:
            self.cache.drop(sequence)
        with suppress(NotOffered), raises("InUse"):
            self.cache.reset()
        self.counted()

    # Reads. Each raises ClauseViolation unless what the cache returns is right.

    def counted(self) -> None:
        with suppress(NotOffered):
            got, what = int(self.cache.num_free_blocks), f"free blocks with {len(self.live)} sequences"
            assert_equal(got, self.free, what)

    def look(self, number: int, layers: Iterable[int] | None = None) -> int:
        """The state of a sequence, in every layer or in some. Returns how many tokens it was compared with."""
        one, config = self.live[number], self.config
        assert_equal(int(self.cache.length(one.id)), one.length, f"length of sequence {number}")
        for layer in self.layers if layers is None else layers:
            what = f"of sequence {number} with {one.length} tokens, layer {layer}"
            inputs, matrix = self.expected(one, layer)
            assert_same(self.cache.read_inputs(one.id, layer), inputs, f"inputs {what}")
            assert_same(self.cache.read_matrix(one.id, layer), matrix, f"matrices {what}")
        with suppress(NotOffered):
            query = np.ones((1, config["num_heads"], config["key_dim"]), np.float32)
            sums = matrix.sum(axis=1)[None]
            assert_same(self.cache.apply(one.id, layer, query), sums, f"read-out of ones {what}")
        return int(min(one.length, max(config["key_dim"], config["num_inputs"]))) * len(self.layers)

    def expected(self, one: SoakState, layer: int) -> tuple[NDArray, NDArray]:
        """The inputs and the matrices of a layer."""
        config, heads = self.config, self.config["num_heads"]
        inputs = np.zeros((config["num_inputs"], heads, config["channels"]), np.float32)
        matrix = np.zeros((heads, config["key_dim"], config["value_dim"]), np.float32)
        last = np.arange(max(0, one.length - config["num_inputs"]), one.length)
        inputs[len(inputs) - len(last) :] = token_content(*_at(one, layer, last), heads, config["channels"], KEYS)
        rows = np.arange(max(0, one.length - config["key_dim"]), one.length)
        values = whole_content(*_at(one, layer, rows), heads, config["value_dim"])
        matrix[:, rows % config["key_dim"]] = values.swapaxes(0, 1)
        return inputs, matrix


def _at(one: SoakState, layer: int, positions: NDArray) -> tuple[NDArray, int, NDArray]:
    streams, places = one.content.at(positions)
    return streams, layer, places


class RecurrentSoakDriver:
    """Serves requests from `SoakRecurrentCache`: prompts begin with their hit, and drafts are rejected."""

    max_tokens = 4096

    def __init__(self, states: SoakRecurrentCache) -> None:
        self.states = states
        self.max_sequences = min(states.subject.size("sequences", 24), states.config["num_blocks"] // 2)
        self.unlimited = states.subject.size("sequences", 10**6) == 10**6
        self.steps = 0

    def running_requests(self) -> Sequence[int]:
        return list(self.states.live)

    def fits(self, numbers: Sequence[int], tokens: int = 1) -> bool:
        return True

    def allows_length(self, tokens: int) -> bool:
        return self.states.free >= 2  # a hit needs a block of its own

    def tokens(self, number: int) -> int:
        return self.states.live[number].length

    def run_event(self, event: WorkloadEvent) -> int:
        """Handles an event. Returns how many tokens were compared."""
        states, numbers = self.states, [number for number in event.numbers if number in self.states.live]
        if event.kind == "admit":
            if len(states.live) < self.max_sequences and self.allows_length(event.tokens):
                self._admit(event)
        elif not numbers:
            return 0
        elif event.kind == "step":
            self._step(numbers)
        elif event.kind == "look":
            return states.look(numbers[0])
        elif event.kind == "drop":
            states.drop(numbers[0])
            states.counted()
        else:
            with suppress(NotOffered):
                self._edit(event)
        return 0

    def _admit(self, event: WorkloadEvent) -> None:
        states, number = self.states, event.numbers[0]
        content = SequenceContent.after_prefix(number, PREFIXES + event.prefix, event.shared)
        try:
            states.begin(number, event.tokens, content, event.shared)
        except NotOffered:
            states.create(number, content)
        while (length := self.tokens(number)) < event.tokens:
            inside = length < event.shared  # checkpoints of a prefix, then of the prompt
            stop = length // states.interval * states.interval + states.interval if inside else event.tokens
            states.append(number, min(stop, event.tokens) - length)
            # A checkpoint at the end of a prompt is found by no request with this prompt. Another one would be taken each time.
            if self.tokens(number) < event.tokens or event.tokens > event.shared:
                self._keep(number)

    def _keep(self, number: int) -> None:
        if self.states.free > SPARE:
            with suppress(NotOffered):
                self.states.keep(number)

    def _step(self, numbers: list[int]) -> None:
        states = self.states
        self.steps += 1
        try:
            if self.steps % 4 == 0:
                raise NotOffered("append_batch in this step")
            states.append_batch(numbers[:: 1 if self.steps % 2 else -1], [1] * len(numbers))
        except NotOffered:
            for number in numbers:
                states.append(number, 1)
        for number in numbers:
            if self.tokens(number) % (4 * states.interval) == 0:
                self._keep(number)
        if self.steps % 16 == 0:
            states.counted()

    def _edit(self, event: WorkloadEvent) -> None:
        """Edits a sequence, if the edit is allowed in its state. Raises NotOffered."""
        states, number = self.states, event.numbers[0]
        one = states.live[number]
        another = len(states.live) < self.max_sequences and states.free >= 1
        if event.kind == "fork" and len(event.numbers) == 2 and another:
            states.fork(number, event.numbers[1])
        elif event.kind == "truncate" and one.content.edits < MAX_EDITS:
            drafts = min(event.tokens % (states.config["max_drafts"] + 1), states.most)
            if drafts:  # rejects all of them or some
                states.append(number, drafts)
                states.truncate(number, one.length - 1 - event.tokens % drafts)
            elif one.checkpoints:
                states.truncate(number, max(one.checkpoints))
        elif event.kind == "move" and another:
            states.move(number)
        elif event.kind == "pressure" and self.unlimited:
            states.refuse(number)
        states.counted()


def server(subject: Subject, heads: int, dim: int) -> RecurrentSoakDriver:
    """Returns a server with 48 states in 2 layers, 150 megabytes of float32. The workload fills it."""
    sizes = {"num_heads": heads, "channels": dim, "key_dim": dim, "value_dim": dim, "num_inputs": 3}
    more = {"num_blocks": 48, "num_layers": 2, "max_drafts": 2, "interval": 16, "delta_rule": 0}
    return RecurrentSoakDriver(SoakRecurrentCache(subject, **sizes, **more))
