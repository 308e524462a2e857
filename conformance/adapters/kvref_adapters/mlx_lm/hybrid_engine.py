"""Adapters of mlx-lm with models that have recurrent state: one prompt cache per session.

A recurrent state cannot be trimmed, so a session is computed anew after a truncation, as mlx-lm's server does.
"""

import copy
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.models import cache as caches
from mlx_lm.utils import load_model

from kvref.canary import Canary
from kvref.canary.hybrid import HybridCanary
from kvref.errors import PositionOutOfRange, SequenceNotFound, in_range
from kvref_adapters._shared.canary_files import EngineAdapter, hybrid_limits, load_once, write_hybrid
from kvref_adapters.mlx_lm.engine import PIECE, MlxLmSessions
from kvref_conformance.exceptions import NotOffered


class MlxLmHybrid(EngineAdapter):
    """With the model's default cache: an `ArraysCache` per layer with recurrent state, a `KVCache` per layer with attention."""

    version = MlxLmSessions.version
    language = "python"
    project = "mlx-lm"

    def loaded(self, canary: Canary, folder: Path, cache_tokens: int) -> Any:
        raise NotOffered("canaries without recurrent state")

    def loaded_hybrid(self, canary: HybridCanary, folder: Path, cache_tokens: int) -> "MlxLmHybridEngine":
        return MlxLmHybridEngine(canary, _load(canary, folder))


class MlxLmLfm2(MlxLmHybrid):
    name = "mlx-lm-lfm2"
    limits: ClassVar[dict[str, Any]] = hybrid_limits("lfm2")


class MlxLmMamba2(MlxLmHybrid):
    name = "mlx-lm-mamba2"
    limits: ClassVar[dict[str, Any]] = hybrid_limits("mamba2")


class MlxLmFalconH1(MlxLmHybrid):
    name = "mlx-lm-falcon-h1"
    limits: ClassVar[dict[str, Any]] = hybrid_limits("falcon-h1")


class MlxLmGraniteMoeHybrid(MlxLmHybrid):
    name = "mlx-lm-granite-moe-hybrid"
    limits: ClassVar[dict[str, Any]] = hybrid_limits("granite-moe-hybrid")


class MlxLmNemotronH(MlxLmHybrid):
    name = "mlx-lm-nemotron-h"
    limits: ClassVar[dict[str, Any]] = hybrid_limits("nemotron-h")


class MlxLmQwen3Next(MlxLmHybrid):
    name = "mlx-lm-qwen3-next"
    limits: ClassVar[dict[str, Any]] = hybrid_limits("qwen3-next")


class MlxLmKimiLinear(MlxLmHybrid):
    name = "mlx-lm-kimi-linear"
    limits: ClassVar[dict[str, Any]] = hybrid_limits("kimi-linear")


@load_once
def _load(canary: HybridCanary, folder: Path) -> Any:
    write_hybrid(canary, folder)
    return load_model(folder)[0]


@dataclass
class HybridSession:
    """cache: contains all tokens, and `ahead`. None: it has to be computed anew. next: the most likely next token, if known.

    ahead: tokens that a batch has generated and put into the cache, and that `step` has not returned yet.
    """

    tokens: list[int] = field(default_factory=list)
    cache: list[Any] | None = None
    next: int | None = None
    ahead: list[int] = field(default_factory=list)


class MlxLmHybridEngine:
    def __init__(self, canary: HybridCanary, model: Any) -> None:
        self._canary, self._model = canary, model
        self._sessions: dict[int, HybridSession] = {}
        self._opened = 0
        self._saved = tempfile.TemporaryDirectory(prefix="mlx-lm")
        self._files = 0

    def open(self) -> int:
        return self._begin(HybridSession())

    def close(self, session: int) -> None:
        self._known(session)
        del self._sessions[session]

    def length(self, session: int) -> int:
        return len(self._known(session).tokens)

    def extend(self, session: int, tokens: Sequence[int]) -> None:
        known = self._known(session)
        if not all(0 <= token < self._canary.vocabulary for token in tokens):
            raise NotOffered("tokens outside the vocabulary")
        self._require_room(known, len(tokens))
        self._compute(known)
        known.tokens += [int(token) for token in tokens]
        self._feed(known, known.tokens[len(known.tokens) - len(tokens) :])

    def generate(self, session: int, count: int) -> list[int]:
        known = self._speaking(session)
        self._require_room(known, in_range(count, None, PositionOutOfRange, "count"))
        self._compute(known)
        return self._generate(known, count)

    def step(self, sessions: Sequence[int]) -> list[int]:
        """One token in each session. All caches are merged for a batch, which generates one token more."""
        speaking = [self._speaking(session) for session in sessions]
        for known in speaking:
            self._require_room(known, 1)
        if any(not known.ahead for known in speaking):
            self._generate_together(speaking)
        for known in speaking:
            known.tokens.append(known.ahead.pop(0))
        return [known.tokens[-1] for known in speaking]

    def sample(self, session: int, n: int, count: int) -> list[int]:
        known = self._speaking(session)
        n, count = in_range(n, None, PositionOutOfRange, "n"), in_range(count, None, PositionOutOfRange, "count")
        self._require_room(known, count)
        self._compute(known)
        return [token for _ in range(n) for token in self._generate(copy.deepcopy(known), count)]

    def cancel(self, session: int, count: int) -> None:
        """Generate half of the tokens with a copy of the cache, because the state cannot be restored otherwise."""
        known = self._speaking(session)
        self._require_room(known, in_range(count, None, PositionOutOfRange, "count"))
        self._compute(known)
        self._generate(copy.deepcopy(known), count // 2)

    def fork(self, session: int) -> int:
        return self._begin(copy.deepcopy(self._known(session)))

    def truncate(self, session: int, length: int) -> None:
        known = self._known(session)
        length = in_range(length, len(known.tokens) + 1, PositionOutOfRange, "length")
        if length < len(known.tokens):
            self._sessions[session] = HybridSession(known.tokens[:length])

    def save(self, session: int) -> int:
        known = self._known(session)
        if not known.tokens:
            raise NotOffered("saving an empty cache")
        self._compute(known)
        saved, self._files = self._files, self._files + 1
        caches.save_prompt_cache(self._file(saved), known.cache, {"tokens": json.dumps([*known.tokens, known.next])})
        return saved

    def load(self, saved: int) -> int:
        if not 0 <= saved < self._files:
            raise SequenceNotFound(f"saved: expected a value returned by `save`, got {saved!r}")
        cache, said = caches.load_prompt_cache(self._file(saved), return_metadata=True)
        *tokens, following = json.loads(said["tokens"])
        return self._begin(HybridSession(tokens, cache, following))

    def _generate(self, known: HybridSession, count: int) -> list[int]:
        for _ in range(count):
            assert known.next is not None
            known.tokens.append(known.next)
            self._feed(known, [known.next])
        return known.tokens[len(known.tokens) - count :]

    def _generate_together(self, sessions: Sequence[HybridSession]) -> None:
        """Generate the next token of each session and one more in a batch of the sessions' caches."""
        for known in sessions:
            self._compute(known)
        batch = BatchGenerator(self._model)
        numbers = batch.insert([[known.next] for known in sessions], [1] * len(sessions), [known.cache for known in sessions])
        replies = dict[int, Any]()
        while generated := batch.next_generated():
            replies |= {reply.uid: reply for reply in generated}
        for number, known in zip(numbers, sessions, strict=True):
            assert known.next is not None
            known.ahead, known.next = [known.next, int(replies[number].token)], None
            known.cache = replies[number].prompt_cache

    def _compute(self, known: HybridSession) -> None:
        """Compute the session anew if its cache is missing, or has tokens that it does not have."""
        if known.tokens and (known.ahead or known.next is None):
            known.cache, known.ahead = None, []
            self._feed(known, known.tokens)

    def _feed(self, known: HybridSession, tokens: Sequence[int]) -> None:
        """Append tokens to the cache, in pieces, and note the token that follows."""
        if known.cache is None:
            known.cache = list(caches.make_prompt_cache(self._model))
        for start in range(0, len(tokens), PIECE):
            logits = self._model(mx.array([tokens[start : start + PIECE]]), cache=known.cache)
            known.next = int(mx.argmax(logits[0, -1]))

    def _begin(self, session: HybridSession) -> int:
        number, self._opened = self._opened, self._opened + 1
        self._sessions[number] = session
        return number

    def _file(self, saved: int) -> str:
        return str(Path(self._saved.name) / f"{saved}.safetensors")

    def _require_room(self, session: HybridSession, count: int) -> None:
        if len(session.tokens) + count > self._canary.context:
            raise NotOffered("sequences longer than the context")

    def _known(self, session: int) -> HybridSession:
        if session not in self._sessions:
            raise SequenceNotFound(f"unknown session {session!r} (never opened, or already closed)")
        return self._sessions[session]

    def _speaking(self, session: int) -> HybridSession:
        known = self._known(session)
        if not known.tokens:
            raise PositionOutOfRange(f"session {session}: expected at least one token, got none")
        return known
