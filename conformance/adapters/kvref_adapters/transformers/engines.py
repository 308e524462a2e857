"""Adapters of Hugging Face transformers as an engine: `generate`, continuous batching, and `transformers serve`.

Adapter of Hugging Face transformers' `generate`: stateless, each call processes whole prompts with a new cache.

Adapter of Hugging Face transformers' continuous batching: a paged cache. Requests share prefix blocks and queue for blocks.

Adapter of `transformers serve`: whole texts, each computed anew, or all of them in the paged cache of continuous batching.
"""

import sys
import threading
import weakref
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, LlamaForCausalLM, MistralForCausalLM

from kvref.canary import UNKNOWN, Canary
from kvref.canary.hybrid import AnyCanary, HybridCanary
from kvref.errors import OutOfBlocks
from kvref_adapters._shared.canary_files import EngineAdapter, hybrid_limits, load_once, write_hybrid
from kvref_adapters._shared.server_process import ServerAdapter
from kvref_canary.files import huggingface as files
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.families.engine.stateless_adapter import WholePrompts


class TransformersGenerate(EngineAdapter):
    """options: arguments of `generate`. attention_by: the attention implementation."""

    name = "transformers-generate"
    version = transformers.__version__
    language = "python"
    project = "transformers"
    attention_by: ClassVar[str] = "eager"

    def loaded(self, canary: Canary, folder: Path, cache_tokens: int) -> "TransformersGenerateEngine":
        return TransformersGenerateEngine(canary, model_of(canary, folder, self.attention_by), self.options)


class TransformersGenerateStatic(TransformersGenerate):
    name = "transformers-generate-static"
    options: ClassVar[dict[str, Any]] = {"cache_implementation": "static", "disable_compile": True}


class TransformersGenerateBeams(TransformersGenerate):
    name = "transformers-generate-beams"
    options: ClassVar[dict[str, Any]] = {"num_beams": 3}


class TransformersGenerateChunked(TransformersGenerate):
    """With prefill in chunks of ten tokens."""

    name = "transformers-generate-chunked"
    options: ClassVar[dict[str, Any]] = {"prefill_chunk_size": 10}


class TransformersGenerateLookup(TransformersGenerate):
    """With prompt lookup decoding: wrong drafts are removed from the cache."""

    name = "transformers-generate-lookup"
    options: ClassVar[dict[str, Any]] = {"prompt_lookup_num_tokens": 4}


class TransformersGenerateAssisted(TransformersGenerate):
    """With assisted generation by a copy of the model, whose drafts are right."""

    name = "transformers-generate-assisted"

    def loaded(self, canary: Canary, folder: Path, cache_tokens: int) -> "TransformersGenerateEngine":
        model = model_of(canary, folder, self.attention_by)
        return TransformersGenerateEngine(canary, model, {"assistant_model": model})


class TransformersGenerateFp8(TransformersGenerate):
    """With a cache in E4M3FN and one scale per layer, for canaries that tolerate the rounding. It has no windows."""

    name = "transformers-generate-fp8"
    limits: ClassVar[dict[str, Any]] = {"engine": {"head_dim": 128, "window": 0}}
    options: ClassVar[dict[str, Any]] = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}

    def loaded(self, canary: Canary, folder: Path, cache_tokens: int) -> "TransformersGenerateEngine":
        if not canary.survives("float8_e4m3fn"):
            raise NotOffered("a canary of these sizes: FP8 is not precise enough for it")
        return super().loaded(canary, folder, cache_tokens)


class TransformersGenerateSdpa(TransformersGenerate):
    name = "transformers-generate-sdpa"
    attention_by = "sdpa"


class TransformersGenerateHybrid(TransformersGenerate):
    """With recurrent state, which `generate` keeps in its cache beside keys and values."""

    def loaded_hybrid(self, canary: HybridCanary, folder: Path, cache_tokens: int) -> "TransformersGenerateEngine":
        return TransformersGenerateEngine(canary, hybrid_model_of(canary, folder), self.options)


class TransformersGenerateLfm2(TransformersGenerateHybrid):
    name = "transformers-generate-lfm2"
    limits: ClassVar[dict[str, Any]] = hybrid_limits("lfm2")


class TransformersGenerateMamba2(TransformersGenerateHybrid):
    name = "transformers-generate-mamba2"
    limits: ClassVar[dict[str, Any]] = hybrid_limits("mamba2")


class TransformersGenerateFalconH1(TransformersGenerateHybrid):
    name = "transformers-generate-falcon-h1"
    limits: ClassVar[dict[str, Any]] = hybrid_limits("falcon-h1")


class TransformersGenerateQwen35(TransformersGenerateHybrid):
    name = "transformers-generate-qwen3.5"
    limits: ClassVar[dict[str, Any]] = hybrid_limits("qwen3.5")


class TransformersGenerateGraniteMoeHybrid(TransformersGenerateHybrid):
    name = "transformers-generate-granite-moe-hybrid"
    limits: ClassVar[dict[str, Any]] = hybrid_limits("granite-moe-hybrid")


class TransformersGenerateBamba(TransformersGenerateHybrid):
    name = "transformers-generate-bamba"
    limits: ClassVar[dict[str, Any]] = hybrid_limits("bamba")


class TransformersGenerateNemotronH(TransformersGenerateHybrid):
    name = "transformers-generate-nemotron-h"
    limits: ClassVar[dict[str, Any]] = hybrid_limits("nemotron-h")


class TransformersGenerateQwen3Next(TransformersGenerateHybrid):
    name = "transformers-generate-qwen3-next"
    limits: ClassVar[dict[str, Any]] = hybrid_limits("qwen3-next")


class TransformersGenerateKimiLinear(TransformersGenerateHybrid):
    name = "transformers-generate-kimi-linear"
    limits: ClassVar[dict[str, Any]] = hybrid_limits("kimi-linear")


class TransformersGenerateEngine(WholePrompts):
    def __init__(self, canary: AnyCanary, model: Any, options: dict[str, Any]) -> None:
        super().__init__(canary)
        self._model, self._options = model, options

    def complete(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        longest = max(map(len, prompts))
        if len(prompts) > 1 and self._options.keys() & {"prompt_lookup_num_tokens", "assistant_model"}:
            raise NotOffered("drafts for a batch of several prompts")
        padded = [[UNKNOWN] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        seen = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        with torch.no_grad():
            said = self._model.generate(
                torch.tensor(padded), attention_mask=torch.tensor(seen), max_new_tokens=count, min_new_tokens=count,
                do_sample=False, **self._options,
            )  # fmt: skip
        return [row[longest:].tolist() for row in said]


_MODELS: dict[tuple[Canary, str], Any] = {}


def model_of(canary: Canary, folder: Path, attention: str) -> Any:
    """The canary in float32, loaded by transformers from its folder. It keeps no state between calls, so it is shared."""
    torch.set_num_threads(1)  # for such small matrices, synchronizing threads costs more than they save
    if (canary, attention) not in _MODELS:
        architecture, model = ("mistral", MistralForCausalLM) if any(canary.windows) else ("llama", LlamaForCausalLM)
        files.write_folder(folder, files.make_files(canary, architecture, "float32"))
        _MODELS[canary, attention] = model.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    return _MODELS[canary, attention]


@load_once
def hybrid_model_of(canary: HybridCanary, folder: Path) -> Any:
    """The hybrid canary in float32, loaded by transformers from its folder."""
    torch.set_num_threads(1)
    write_hybrid(canary, folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


PAGE = 16  # tokens per block
BATCH = 48  # tokens computed together: fewer than some of the judge's prompts have
SPARE = 2  # blocks beyond those of one whole context: so few that concurrent requests have to wait for free blocks
RUNNING: "weakref.WeakSet[Any]" = weakref.WeakSet()  # managers whose thread runs


class TransformersContinuous(EngineAdapter):
    name = "transformers-continuous"
    version = transformers.__version__
    language = "python"
    project = "transformers"

    def loaded(self, canary: Canary, folder: Path, cache_tokens: int) -> "TransformersContinuousEngine":
        return TransformersContinuousEngine(canary, model_of(canary, folder, "sdpa"))


class TransformersContinuousEngine(WholePrompts):
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


BLOCK, CONTEXTS = 32, 8  # tokens per block; number of whole contexts that the cache has room for
COMMAND = "from transformers.cli.transformers import main; main()"  # the code of the script `transformers`


class TransformersServe(ServerAdapter):
    name = "transformers-serve"
    version = version("transformers")
    language = "python"
    project = "transformers"

    def command(self, canary: Canary, folder: Path, port: int) -> Sequence[str]:
        return [
            sys.executable,
            "-c",
            COMMAND,
            "serve",
            str(folder),
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--device",
            "cpu",
        ]


class TransformersServeContinuous(TransformersServe):
    name = "transformers-serve-continuous"

    def command(self, canary: Canary, folder: Path, port: int) -> Sequence[str]:
        """The command. It limits the size of the cache: the default is most of the memory of the machine."""
        blocks = -(-CONTEXTS * canary.context // BLOCK)
        sizes = ["--cb-block-size", str(BLOCK), "--cb-num-blocks", str(blocks), "--cb-max-batch-tokens", str(2 * canary.context)]
        return [*super().command(canary, folder, port), "--continuous-batching", *sizes]
