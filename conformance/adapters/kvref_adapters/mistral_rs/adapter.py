"""Adapter of mistral.rs (Rust): whole texts, several at a time, with a prefix cache."""

import json
import os
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

os.environ.setdefault("RUST_LOG", "error")  # set before mistralrs is imported, because it logs to standard output

from mistralrs import Architecture, ChatCompletionRequest, ModelDType, Runner, Which

from kvref.canary import Canary
from kvref.errors import PositionOutOfRange, in_range
from kvref_adapters._shared.canary_files import EngineAdapter
from kvref_canary.files import huggingface as files
from kvref_canary.files.vocabulary import to_text, to_tokens
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.families.engine.stateless_adapter import WholePrompts

GREEDY: dict[str, Any] = {"model": "default", "temperature": 0.0, "top_k": 1, "ignore_eos": True}


class MistralRsCompletions(EngineAdapter):
    """options: arguments of the runner. On a CPU the cache is float16, whatever the dtype of the model."""

    name = "mistral.rs"
    version = version("mistralrs")
    language = "rust"
    project = "mistral.rs"
    formats: ClassVar[tuple[str, ...]] = ("float16",)

    def loaded(self, canary: Canary, folder: Path, cache_tokens: int) -> "MistralRsEngine":
        if not canary.survives("float16"):
            raise NotOffered("a canary of these sizes: float16 is not precise enough for it")
        files.write_folder(folder, _folder(canary))
        architecture = Architecture.Mistral if any(canary.windows) else Architecture.Llama
        which: Any = Which.Plain(model_id=str(folder), arch=architecture, dtype=ModelDType.F32)
        return MistralRsEngine(canary, Runner(which=which, **self.options))


class MistralRsEngine(WholePrompts):
    def __init__(self, canary: Canary, runner: Any) -> None:
        super().__init__(canary)
        self._runner = runner

    def complete(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """Stream the completions, because the runner accepts no other request while one waits for its complete reply."""
        streams = [self._asked(prompt, count, stream=True) for prompt in prompts]
        return [self._read(chunk.choices[0].delta.content for chunk in stream) for stream in streams]

    def sample(self, session: int, n: int, count: int) -> list[int]:
        told = self._speaks(session, count)
        if not in_range(n, None, PositionOutOfRange, "n") or not count:
            return []
        answer = self._asked(told, count, n_choices=n)
        return self._read(choice.message.content for choice in answer.choices)

    def cancel(self, session: int, count: int) -> None:
        """Close a stream after half of its tokens."""
        told = self._speaks(session, count)
        stream = self._asked(told, max(count, 1), stream=True)
        for _ in range(count // 2):
            next(stream)

    def _speaks(self, session: int, count: int) -> list[int]:
        told = self._session_tokens(session, generates=True)
        self._check_room(told, in_range(count, None, PositionOutOfRange, "count"))
        return told

    def _asked(self, prompt: Sequence[int], count: int, **options: Any) -> Any:
        request = ChatCompletionRequest(messages=to_text(self.canary, prompt), max_tokens=count, **GREEDY, **options)
        return self._runner.send_chat_completion_request(request)

    def _read(self, said: Iterable[str]) -> list[int]:
        return to_tokens(self.canary, "".join(said))


def _folder(canary: Canary) -> files.Files:
    """Return the canary's files, with a tokenizer and a chat template that add nothing to a text.

    mistral.rs rejects a tokenizer without a decoder, so it has a simple one.
    """
    made = files.make_files(canary, "mistral" if any(canary.windows) else "llama", "float32")
    changes = {
        "tokenizer.json": {"post_processor": None, "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}]}},
        "tokenizer_config.json": {"chat_template": "{{ messages[0]['content'] }}"},
    }
    return made | {name: json.dumps(json.loads(made[name]) | change).encode() for name, change in changes.items()}
