"""Adapters of mlx-lm as an engine: one prompt cache per session, and its server.

Adapter of mlx-lm with one prompt cache per session, which the adapter trims, copies, saves, loads, and merges for a batch.

Adapter of mlx-lm's own server: whole texts, with a prompt cache that keeps prefixes between requests.
"""

import copy
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import mlx_lm
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models import cache as caches
from mlx_lm.utils import load_model

from kvref.canary import Canary
from kvref.errors import PositionOutOfRange, SequenceNotFound, in_range
from kvref_adapters._shared.canary_files import EngineAdapter, write_canary
from kvref_adapters._shared.server_process import ServerAdapter
from kvref_conformance.exceptions import NotOffered

PIECE = 16  # prefill chunk in tokens: shorter than the judge's prompts


class MlxLmSessions(EngineAdapter):
    """With the model's default cache: for a Llama one `KVCache` per layer. options: arguments of `generate_step`."""

    name = "mlx-lm"
    version = f"{mlx_lm.__version__}, mlx {mx.__version__}"
    language = "python"
    project = "mlx-lm"
    options: ClassVar[dict[str, Any]] = {"prefill_step_size": PIECE}

    def loaded(self, canary: Canary, folder: Path, cache_tokens: int) -> "MlxLmEngine":
        return MlxLmEngine(canary, load(canary, folder), self.cache, self.options)

    def cache(self, canary: Canary, model: Any) -> list[Any]:
        return list(caches.make_prompt_cache(model))


class MlxLmQuantizedSessions(MlxLmSessions):
    """With a `QuantizedKVCache` of eight bits from the first token on, for canaries that tolerate the rounding."""

    name = "mlx-lm-quantized"

    def loaded(self, canary: Canary, folder: Path, cache_tokens: int) -> "MlxLmEngine":
        if not canary.survives("q8"):
            raise NotOffered("a canary of these sizes: eight bits are not precise enough for it")
        group = 64 if canary.head_dim % 64 == 0 else 32
        options = self.options | {"kv_bits": 8, "kv_group_size": group, "quantized_kv_start": 0}
        return MlxLmEngine(canary, load(canary, folder), self.cache, options)


class MlxLmRotatingSessions(MlxLmSessions):
    """With one `RotatingKVCache` per layer, as large as the layer's window, or as the context if the layer has no window."""

    name = "mlx-lm-rotating"

    def cache(self, canary: Canary, model: Any) -> list[Any]:
        return [caches.RotatingKVCache(window or canary.context) for window in canary.windows]


def load(canary: Canary, folder: Path) -> Any:
    """The canary in float32, loaded by mlx-lm from Hugging Face's folder."""
    write_canary(canary, folder)
    return load_model(folder)[0]


class MlxLmSession:
    """One session. tokens: prompt and generated tokens. cached: how many of them are in the cache: all, or all but the last.

    The model processes the last token when it generates the next one.
    """

    def __init__(self, cache: list[Any], tokens: Sequence[int] = (), cached: int = 0) -> None:
        self.cache, self.tokens, self.cached = cache, list(tokens), cached

    def trim(self, length: int) -> None:
        """Remove all cached tokens after the first `length`."""
        if self.cached > length:
            if not caches.can_trim_prompt_cache(self.cache):
                raise NotOffered("trimming a full ring buffer")
            caches.trim_prompt_cache(self.cache, self.cached - length)
            self.cached = length


class MlxLmEngine:
    def __init__(self, canary: Canary, model: Any, cache: Any, options: dict[str, Any]) -> None:
        self._canary, self._model, self._cache, self._options = canary, model, cache, options
        self._sessions: dict[int, MlxLmSession] = {}
        self._opened = 0
        self._saved = tempfile.TemporaryDirectory(prefix="mlx-lm")
        self._files = 0

    def open(self) -> int:
        return self._new(MlxLmSession(self._cache(self._canary, self._model)))

    def close(self, session: int) -> None:
        self._known(session)
        del self._sessions[session]

    def length(self, session: int) -> int:
        return len(self._known(session).tokens)

    def extend(self, session: int, tokens: Sequence[int]) -> None:
        known = self._known(session)
        if not all(0 <= token < self._canary.vocabulary for token in tokens):
            raise NotOffered("tokens outside the vocabulary")
        self._room(known, len(tokens))
        known.tokens += [int(token) for token in tokens]
        if behind := known.tokens[known.cached : -1]:
            list(self._steps(known, behind, 0))
            known.cached += len(behind)

    def generate(self, session: int, count: int) -> list[int]:
        known = self._speaking(session)
        if not in_range(count, None, PositionOutOfRange, "count"):
            return []
        self._room(known, count)
        known.trim(len(known.tokens) - 1)
        known.tokens += [token for token, _ in self._steps(known, known.tokens[-1:], count)]
        known.cached = len(known.tokens)
        return known.tokens[-count:]

    def step(self, sessions: Sequence[int]) -> list[int]:
        speaking = [self._speaking(session) for session in sessions]
        for each in speaking:
            self._room(each, 1)
        said = self._together(speaking, 1)
        for each, ((token,), cache) in zip(speaking, said, strict=True):
            each.tokens.append(token)
            each.cache, each.cached = cache, len(each.tokens)
        return [token for (token,), _ in said]

    def sample(self, session: int, n: int, count: int) -> list[int]:
        known = self._speaking(session)
        n, count = in_range(n, None, PositionOutOfRange, "n"), in_range(count, None, PositionOutOfRange, "count")
        if not n or not count:
            return []
        self._room(known, count)
        return [token for tokens, _ in self._together([known] * n, count) for token in tokens]

    def cancel(self, session: int, count: int) -> None:
        """Stop the generation halfway, then trim the cache to its previous length."""
        known = self._speaking(session)
        self._room(known, in_range(count, None, PositionOutOfRange, "count"))
        known.trim(len(known.tokens) - 1)
        before = known.cached
        steps = self._steps(known, known.tokens[-1:], count)
        for _ in range(count // 2):
            next(steps)
        steps.close()
        known.cached = int(known.cache[0].offset)
        known.trim(before)

    def fork(self, session: int) -> int:
        known = self._known(session)
        return self._new(MlxLmSession(copy.deepcopy(known.cache), known.tokens, known.cached))

    def truncate(self, session: int, length: int) -> None:
        known = self._known(session)
        length = in_range(length, len(known.tokens) + 1, PositionOutOfRange, "length")
        known.trim(length)
        del known.tokens[length:]

    def save(self, session: int) -> int:
        known = self._known(session)
        if not known.cached:
            raise NotOffered("saving an empty cache")
        saved, self._files = self._files, self._files + 1
        caches.save_prompt_cache(self._file(saved), known.cache, {"tokens": json.dumps(known.tokens)})
        return saved

    def load(self, saved: int) -> int:
        if not 0 <= saved < self._files:
            raise SequenceNotFound(f"saved: expected a value returned by `save`, got {saved!r}")
        cache, said = caches.load_prompt_cache(self._file(saved), return_metadata=True)
        return self._new(MlxLmSession(cache, json.loads(said["tokens"]), int(cache[0].offset)))

    def _steps(self, session: MlxLmSession, prompt: list[int], count: int) -> Any:
        return generate_step(mx.array(prompt), self._model, max_tokens=count, prompt_cache=session.cache, **self._options)

    def _together(self, sessions: Sequence[MlxLmSession], count: int) -> list[tuple[list[int], Any]]:
        """Generate in one batch. Return for each session its new tokens and a cache that contains them.

        The sessions' own caches do not change.
        """
        if any(not hasattr(layer, "merge") for session in sessions for layer in session.cache):
            raise NotOffered("batches of this type of cache")
        for session in sessions:
            session.trim(len(session.tokens) - 1)
        batch = BatchGenerator(self._model)
        numbers = batch.insert(
            [session.tokens[-1:] for session in sessions], [count] * len(sessions), [session.cache for session in sessions]
        )
        said: dict[int, list[int]] = {number: [] for number in numbers}
        after: dict[int, Any] = {}
        while replies := batch.next_generated():
            for reply in replies:
                said[reply.uid].append(int(reply.token))
                after[reply.uid] = reply.prompt_cache
        return [(said[number], after[number]) for number in numbers]

    def _new(self, session: MlxLmSession) -> int:
        number, self._opened = self._opened, self._opened + 1
        self._sessions[number] = session
        return number

    def _file(self, saved: int) -> str:
        return str(Path(self._saved.name) / f"{saved}.safetensors")

    def _room(self, session: MlxLmSession, count: int) -> None:
        if len(session.tokens) + count > self._canary.context:
            raise NotOffered("sequences longer than the context")

    def _known(self, session: int) -> MlxLmSession:
        if session not in self._sessions:
            raise SequenceNotFound(f"unknown session {session!r} (never opened, or already closed)")
        return self._sessions[session]

    def _speaking(self, session: int) -> MlxLmSession:
        known = self._known(session)
        if not known.tokens:
            raise PositionOutOfRange(f"session {session}: expected at least one token, got none")
        return known


class MlxLmServer(ServerAdapter):
    name = "mlx-lm-server"
    version = f"{mlx_lm.__version__}, mlx {mx.__version__}"
    language = "python"
    project = "mlx-lm"

    def command(self, canary: Canary, folder: Path, port: int) -> Sequence[str]:
        return [sys.executable, "-m", "mlx_lm", "server", "--model", str(folder), "--port", str(port)]


class MlxLmServerWithDraft(MlxLmServer):
    """With speculative decoding from a draft model."""

    name = "mlx-lm-server-draft"

    def command(self, canary: Canary, folder: Path, port: int) -> Sequence[str]:
        draft = folder.with_name("draft")
        write_canary(_draft_model(canary), draft)
        return [*super().command(canary, folder, port), "--draft-model", str(draft)]


def _draft_model(canary: Canary) -> Canary:
    """A draft model that looks back one token too far and so is nearly always wrong; the canary itself if impossible."""
    if canary.recalls or any(canary.windows):
        return canary
    return replace(canary, offsets=(*canary.offsets[:-1], canary.offsets[-1] + 1))
