"""Adapter of Hugging Face transformers' continuous batching: a paged cache. Requests share prefix blocks and queue for blocks."""

import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig

from kvref.canary import Canary
from kvref.errors import OutOfBlocks
from kvref_conformance.families.engine.whole import WholePrompts
from kvref_conformance.implementations.engines.loading import Loads
from kvref_conformance.implementations.engines.transformers_generate import model_of

PAGE = 16  # tokens per block
BATCH = 48  # tokens computed together: fewer than some of the judge's prompts have
SPARE = 2  # blocks beyond those of one whole context: so few that concurrent requests have to wait for free blocks
RUNNING: "weakref.WeakSet[Any]" = weakref.WeakSet()  # managers whose thread runs


class Continuous(Loads):
    name = "transformers-continuous"
    version = transformers.__version__
    language = "python"
    project = "transformers"

    def loaded(self, canary: Canary, folder: Path, cache_tokens: int) -> "Engine":
        return Engine(canary, model_of(canary, folder, "sdpa"))


class Engine(WholePrompts):
    """One manager for all calls, so that prefix blocks are reused between calls."""

    def __init__(self, canary: Canary, model: Any) -> None:
        super().__init__(canary)
        self._manager = model.init_continuous_batching(
            GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=1),
            ContinuousBatchingConfig(
                page_size=PAGE, num_blocks=-(-canary.context // PAGE) + SPARE, max_batch_tokens=BATCH, auto_switch_to_flash=False
            ),
        )
        self._manager.start()
        weakref.finalize(self, self._manager.stop)
        if not RUNNING:
            threading.Thread(target=_stop_at_the_end).start()
        RUNNING.add(self._manager)

    def complete(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        numbers = self._manager.add_requests([list(prompt) for prompt in prompts], max_new_tokens=count)
        said = dict[str, list[int]]()
        while len(said) < len(numbers):
            result = self._manager.get_result(timeout=1)
            if result is None and not self._manager.is_running():
                raise RuntimeError("the manager's thread ended")
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise OutOfBlocks(result.error)
                said[result.request_id] = result.generated_tokens
        return [said[number] for number in numbers]


def _stop_at_the_end() -> None:
    """Stop all managers at exit: their threads are not daemons and would keep the process alive."""
    threading.main_thread().join()
    for manager in list(RUNNING):
        manager.stop()
