"""Adapter of llama.cpp's C API: each session is a sequence of one llama.cpp cache.

`truncate`, and the rollback after a failed call, remove positions from the cache. The logits after the remaining tokens are then
not available, so the last remaining token is decoded again before the next token is generated.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from kvref.canary import Canary
from kvref.errors import (
    CapacityExceeded,
    OutOfBlocks,
    PositionOutOfRange,
    SequenceNotFound,
    TokenOutOfRange,
    in_range,
)
from kvref_adapters._shared.canary_files import EngineAdapter
from kvref_adapters.llama_cpp.c_api import (
    ABORTED,
    BLOCK,
    DONE,
    MOST_SEQUENCES,
    NO_SLOT,
    VERSION,
    BatchRow,
    LlamaContext,
    LlamaModel,
)
from kvref_canary.files import gguf
from kvref_conformance.outcome import NotOffered

LEAST = 64  # tokens per session: the cache has to accept cache_tokens in total, in sessions of at least this length


class LlamaCpp(EngineAdapter):
    """One cache of float16 for all sequences; llama.cpp decides about flash attention. options: arguments of `Context`."""

    name = "llama.cpp"
    version = VERSION
    language = "c++"
    project = "llama.cpp"
    options: ClassVar[dict[str, Any]] = {}

    def loaded(self, canary: Canary, folder: Path, cache_tokens: int) -> "LlamaCppEngine":
        asked: dict[str, Any] = {"type_k": "f16", "type_v": "f16", "flash_attn": -1, "kv_unified": True} | self.options
        if any(canary.windows):
            raise NotOffered("windows: llama.cpp's Llama has none")
        if asked["type_k"].startswith("q") and canary.head_dim % BLOCK:
            raise NotOffered(f"a cache of {asked['type_k']} with head_dim {canary.head_dim}, which is not a multiple of {BLOCK}")
        sequences, cells = min(MOST_SEQUENCES, cache_tokens), cache_tokens  # llama.cpp aborts with fewer cells than sequences
        if not asked["kv_unified"]:
            sequences = min(MOST_SEQUENCES, -(-cache_tokens // LEAST))
            cells = sequences * canary.context
        batch = max(canary.context, MOST_SEQUENCES)
        context = LlamaContext(_model(canary, folder), n_ctx=cells, n_batch=batch, n_seq_max=sequences, **asked)
        return LlamaCppEngine(canary.vocabulary, context, sequences)


class LlamaCppSplit(LlamaCpp):
    """A separate part of the cache for each sequence."""

    name = "llama.cpp-split"
    options: ClassVar[dict[str, Any]] = {"kv_unified": False}


class LlamaCppNoFlash(LlamaCpp):
    name = "llama.cpp-no-flash"
    options: ClassVar[dict[str, Any]] = {"flash_attn": 0}


class LlamaCppQ8(LlamaCpp):
    name = "llama.cpp-q8"
    options: ClassVar[dict[str, Any]] = {"type_k": "q8_0", "type_v": "q8_0"}


@dataclass
class LlamaCppSession:
    """One session.

    sequence: its sequence id, None if it has no tokens in the cache. cached: the number of its tokens in the cache. next: the
    most likely next token, None if it has to be computed.
    """

    tokens: list[int] = field(default_factory=list)
    sequence: int | None = None
    cached: int = 0
    next: int | None = None

    def missing(self, more: Sequence[int]) -> list[BatchRow]:
        """Return the session's tokens and `more` that are not cached, as rows of a batch; only the last row requests logits."""
        assert self.sequence is not None
        tokens = [*self.tokens, *more]
        return [BatchRow(tokens[at], at, self.sequence, at == len(tokens) - 1) for at in range(self.cached, len(tokens))]


class LlamaCppEngine:
    def __init__(self, vocabulary: int, context: LlamaContext, sequences: int) -> None:
        self._vocabulary, self._context = vocabulary, context
        self._length = context.model.context_length
        self._free = list(range(sequences))
        self._sessions: dict[int, LlamaCppSession] = {}
        self._saved: dict[int, tuple[LlamaCppSession, bytes]] = {}
        self._opened = 0

    def open(self) -> int:
        return self._begin(LlamaCppSession())

    def close(self, session: int) -> None:
        self._forget(self._known(session), 0)
        del self._sessions[session]

    def length(self, session: int) -> int:
        return len(self._known(session).tokens)

    def extend(self, session: int, tokens: Sequence[int]) -> None:
        told = self._known(session)
        given = [in_range(token, self._vocabulary, TokenOutOfRange, "token") for token in tokens]
        self._room(told, len(given))
        if given:
            self._tell([told], [given])

    def generate(self, session: int, count: int) -> list[int]:
        told = self._speaking(session)
        start = len(told.tokens)
        count = min(in_range(count, None, PositionOutOfRange, "count"), self._length - start)
        try:
            for _ in range(count):
                self._say([told])
        except OutOfBlocks:
            self._cut(told, start)
            raise
        return told.tokens[start:]

    def step(self, sessions: Sequence[int]) -> list[int]:
        told = [self._speaking(session) for session in sessions]
        for each in told:
            self._room(each, 1)
        return self._say(told) if told else []

    def sample(self, session: int, n: int, count: int) -> list[int]:
        """Generate from n forks of the session, all in one batch."""
        told = self._speaking(session)
        self._room(told, in_range(count, None, PositionOutOfRange, "count"))
        forks = list[int]()
        try:
            for _ in range(in_range(n, None, PositionOutOfRange, "n")):
                forks.append(self.fork(session))
            for _ in range(count):
                self.step(forks)
            return [token for fork in forks for token in self._sessions[fork].tokens[len(told.tokens) :]]
        finally:
            for fork in forks:
                self.close(fork)

    def cancel(self, session: int, count: int) -> None:
        """Generate half of the tokens, then abort the computation of the next one."""
        told = self._speaking(session)
        self._room(told, in_range(count, None, PositionOutOfRange, "count"))
        start = len(told.tokens)
        try:
            for _ in range(count // 2):
                self._say([told])
            if count:
                answer = self._context.decode_aborted(told.missing(self._ready([told])))
                if answer not in (ABORTED, NO_SLOT):
                    raise RuntimeError(f"llama_decode returned {answer} although it was aborted")
        finally:
            self._cut(told, start)

    def fork(self, session: int) -> int:
        told = self._known(session)
        child = LlamaCppSession(list(told.tokens), None, told.cached, told.next)
        if told.sequence is not None:
            child.sequence = self._taken()
            self._context.seq_cp(told.sequence, child.sequence)
        return self._begin(child)

    def truncate(self, session: int, length: int) -> None:
        told = self._known(session)
        self._cut(told, in_range(length, len(told.tokens) + 1, PositionOutOfRange, "length"))

    def remove(self, session: int, start: int, stop: int) -> None:
        raise NotOffered("removal that equals a fresh prefill: llama.cpp moves the later entries and does not recompute them")

    def shift(self, session: int, start: int, stop: int) -> None:
        """Context shift: remove positions [start, stop), move later entries down, and re-rotate their keys.

        The cache must have at least one entry after `stop`.
        """
        told = self._known(session)
        assert told.sequence is not None and 0 <= start < stop < told.cached
        self._context.seq_rm(told.sequence, start, stop)
        self._context.seq_add(told.sequence, stop, start - stop)
        del told.tokens[start:stop]
        told.cached -= stop - start
        told.next = None

    def save(self, session: int) -> int:
        told = self._known(session)
        number = len(self._saved)
        data = b"" if told.sequence is None else self._context.seq_get(told.sequence)
        self._saved[number] = LlamaCppSession(list(told.tokens), None, told.cached, told.next), data
        return number

    def load(self, saved: int) -> int:
        if saved not in self._saved:
            raise SequenceNotFound(f"saved: expected a value returned by `save`, got {saved!r}")
        kept, data = self._saved[saved]
        told = LlamaCppSession(list(kept.tokens), None, kept.cached, kept.next)
        if data:
            told.sequence = self._taken()
            if not self._context.seq_set(told.sequence, data):
                self._forget(told, 0)
                raise OutOfBlocks(f"load: the cache has no room for {len(told.tokens)} tokens")
        return self._begin(told)

    def _begin(self, told: LlamaCppSession) -> int:
        session, self._opened = self._opened, self._opened + 1
        self._sessions[session] = told
        return session

    def _say(self, told: Sequence[LlamaCppSession]) -> list[int]:
        """Generate one token in each session, or in none if an error is raised."""
        said = self._ready(told)
        self._tell(told, [[token] for token in said])
        return said

    def _ready(self, told: Sequence[LlamaCppSession]) -> list[int]:
        """Return the next token of each session. Where it is not known, the last token is decoded again."""
        for each in told:
            if each.next is None:
                self._forget(each, len(each.tokens) - 1)
                self._tell([each], [[]])
        return [each.next for each in told if each.next is not None]

    def _tell(self, told: Sequence[LlamaCppSession], given: Sequence[Sequence[int]]) -> None:
        """Decode new tokens of all sessions in one batch. If OutOfBlocks is raised, no session changes."""
        for each in told:
            if each.sequence is None:
                each.sequence = self._taken()
        rows = [each.missing(more) for each, more in zip(told, given, strict=True)]
        answer = self._context.decode([row for each in rows for row in each])
        if answer != DONE:
            for each in told:
                self._forget(each, each.cached)
            if answer == NO_SLOT:
                raise OutOfBlocks(f"llama_decode found no room for {sum(map(len, rows))} tokens")
            raise RuntimeError(f"llama_decode returned {answer}")
        spoke = -1
        for each, more, its in zip(told, given, rows, strict=True):
            spoke += len(its)
            each.tokens += more
            each.cached = len(each.tokens)
            each.next = int(self._context.logits(spoke, self._vocabulary).argmax())

    def _cut(self, told: LlamaCppSession, length: int) -> None:
        """Keep only the first `length` tokens. The next token stays known if no token was removed."""
        if length < len(told.tokens) or told.cached < length:
            del told.tokens[length:]
            told.next = None
        self._forget(told, length)

    def _forget(self, told: LlamaCppSession, length: int) -> None:
        """Keep only the first `length` tokens in the cache. Frees the session's sequence if none are left."""
        told.cached = min(told.cached, length)
        if told.sequence is None:
            return
        self._context.seq_rm(told.sequence, told.cached, -1)
        if not told.cached:
            self._free.append(told.sequence)
            told.sequence = None

    def _taken(self) -> int:
        if not self._free:
            raise OutOfBlocks("out of sequences: 1 needed, 0 free")
        return self._free.pop()

    def _room(self, told: LlamaCppSession, count: int) -> None:
        """Raise CapacityExceeded past the model's context: llama.cpp leaves this check to its callers."""
        if len(told.tokens) + count > self._length:
            raise CapacityExceeded(
                f"context full: {count} tokens needed, {self._length - len(told.tokens)} of {self._length} left"
            )

    def _speaking(self, session: int) -> LlamaCppSession:
        told = self._known(session)
        if not told.tokens:
            raise PositionOutOfRange(f"session {session}: expected at least one token, got none")
        return told

    def _known(self, session: int) -> LlamaCppSession:
        if session not in self._sessions:
            raise SequenceNotFound(f"unknown session {session!r} (never opened, or already closed)")
        return self._sessions[session]


_MODELS: dict[Canary, LlamaModel] = {}


def _model(canary: Canary, folder: Path) -> LlamaModel:
    """The canary in float32. The cache belongs to a context, not to the model, so the model is shared."""
    if canary not in _MODELS:
        file = folder / "canary.gguf"
        gguf.write(file, gguf.gguf(canary, "float32"))
        _MODELS[canary] = LlamaModel(file)
    return _MODELS[canary]
