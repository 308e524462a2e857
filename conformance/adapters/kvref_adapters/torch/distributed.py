"""Adapter of a sharded cache over `torch.distributed` with gloo: one process per rank, all grids of two to four ranks.

PyTorch has no sharded cache of its own. The cache here is built from its parts as engines do it: an `all_reduce` by which the
ranks agree that all received the tokens, and an `all_gather` of outputs and log-sum-exps within a row of the grid. A process that
ends is a lost rank: gloo reports it to the ranks that wait for it, the pipe to all others.
"""

import itertools
import multiprocessing
import tempfile
import weakref
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from time import monotonic
from typing import Any, ClassVar

import numpy as np
import torch

import kvref
from kvref.attention import accept_query
from kvref.errors import CapacityExceeded, PositionOutOfRange, RankLost, RankOutOfRange, in_range
from kvref.validation import accept_pair
from kvref_adapters.torch import rank_process
from kvref_conformance.implementation_api import Level

ANSWERED = 8.0  # seconds in which a rank must reply, including the time that it waits for other ranks
_FORK = multiprocessing.get_context("forkserver")  # all ranks are forked from one process that has imported PyTorch
_FORK.set_forkserver_preload([rank_process.__name__])


class World:
    """Connected rank processes. Several caches can share them."""

    def __init__(self, size: int, delays: dict[int, float]) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="kvref-ranks-")
        ends = [_FORK.Pipe() for _ in range(size)]
        self.pipes = [own for own, _ in ends]
        store = str(Path(self.folder.name) / "store")
        self.processes = [
            _FORK.Process(target=rank_process.serve, args=(end, number, size, store, delays.get(number, 0.0)), daemon=True)
            for number, (_, end) in enumerate(ends)
        ]
        for process, (_, end) in zip(self.processes, ends, strict=True):
            process.start()
            end.close()
        self.lost: set[int] = set()
        self.numbers, self.forgotten = itertools.count(), list[int]()  # ids of new caches, and of caches to delete
        weakref.finalize(self, _ended, self.processes, self.folder)
        self._answers(range(size))
        self.folder.cleanup()  # all ranks are connected and have created every group, so the file is no longer needed

    def ask(self, ranks: Iterable[int], name: str, cache: int, *args: Any) -> list[Any]:
        """Return these ranks' replies. Raises RankLost after all remaining ranks have replied."""
        return self.ask_each(dict.fromkeys(ranks, args), name, cache)

    def ask_each(self, args: dict[int, Any], name: str, cache: int) -> list[Any]:
        """Like `ask`, with separate arguments for each rank."""
        self.need(args)
        for rank, own in args.items():
            try:
                self.pipes[rank].send((name, cache, own))
            except OSError:
                self.lost.add(rank)
        if self.lost.intersection(args):
            self._stop(set(args) - self.lost)  # sent after the request: a rank ignores a STOP that arrives before it
        return self._answers(args)

    def _answers(self, ranks: Iterable[int]) -> list[Any]:
        answers: dict[int, Any] = {}
        missing, until = set(ranks) - self.lost, monotonic() + ANSWERED
        while missing:
            ready = wait([self.pipes[rank] for rank in missing], max(0.0, until - monotonic()))
            for rank in [rank for rank in missing if self.pipes[rank] in ready or not ready]:
                missing.discard(rank)
                if not ready:
                    self.kill(rank)  # otherwise a late reply would be taken for the reply to the next request
                    continue
                try:
                    answers[rank] = self.pipes[rank].recv()
                except (EOFError, OSError):
                    self.lost.add(rank)
                    self._stop(missing)
        self.need(ranks)
        if any(isinstance(each, str) for each in answers.values()):  # rank_process.LOST
            raise RankLost("a rank did not reply within the time limit")
        return [answers[rank] for rank in ranks]

    def _stop(self, waiting: Iterable[int]) -> None:
        """Tell these ranks to stop waiting for a lost rank."""
        for rank in waiting:
            with suppress(OSError):
                self.pipes[rank].send((rank_process.STOP, 0, ()))

    def need(self, ranks: Iterable[int]) -> None:
        """Raise RankLost if one of these ranks is lost."""
        if gone := sorted(self.lost.intersection(ranks)):
            raise RankLost(f"ranks {gone} are lost: their processes have ended")

    def kill(self, rank: int) -> None:
        """Kill a rank's process."""
        self.processes[rank].kill()
        self.processes[rank].join()
        self.lost.add(rank)


def _ended(processes: list[Any], folder: Any) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
    folder.cleanup()


class TorchShardedCache:
    def __init__(self, config: kvref.ShardedConfig, world: World) -> None:
        self.config, self.length = config, 0
        self._world, self._failing = world, set[int]()
        self._id = next(world.numbers)
        self._ranks = range(config.num_ranks)
        while world.forgotten:
            world.ask(self._ranks, "forget", world.forgotten.pop())
        # only noted here, because a finalizer can run at any time; the ranks delete it later
        weakref.finalize(self, world.forgotten.append, self._id)
        world.ask_each(dict.fromkeys(self._ranks, vars(config)), "new", self._id)

    def append(self, keys: Any, values: Any) -> None:
        shape = "n", self.config.num_kv_heads, self.config.head_dim
        keys, values = accept_pair(keys, values, shape, BACKEND)
        count = len(keys)
        if self.length + count > self.config.max_tokens:
            raise CapacityExceeded(f"cache full: {self.length + count} tokens needed, max_tokens is {self.config.max_tokens}")
        self._world.need(self._ranks)
        if not count:
            return
        whole = keys.numpy(), values.numpy()
        try:
            self._world.ask_each({rank: (*whole, rank in self._failing) for rank in self._ranks}, "prepare", self._id)
        finally:
            self._failing.clear()
        self._decided("keep")
        self.length += count

    def read(self) -> tuple[Any, Any]:
        self._world.need(self._ranks)
        whole = np.zeros((2, self.length, self.config.num_kv_heads, self.config.head_dim), np.float32)
        for (heads, positions, *_), share in zip(self._all("held"), self._all("read"), strict=True):
            whole[np.ix_((0, 1), positions, heads)] = np.stack(share)
        return torch.from_numpy(whole[0]), torch.from_numpy(whole[1])

    def read_rank(self, rank: int) -> tuple[Any, Any]:
        keys, values = self._one(rank, "read")
        return torch.from_numpy(keys), torch.from_numpy(values)

    def heads(self, rank: int) -> list[int]:
        return list(self._one(rank, "held")[0])

    def positions(self, rank: int) -> list[int]:
        return list(self._one(rank, "held")[1])

    def block_table(self, rank: int) -> list[int]:
        return list(self._one(rank, "held")[2])

    def num_bytes(self, rank: int) -> int:
        return int(self._one(rank, "held")[3])

    def attend(self, query: Any, scale: float) -> Any:
        query = accept_query(query, "num_queries", self.config.num_kv_heads, self.config.head_dim, BACKEND)
        in_range(len(query), self.length + 1, PositionOutOfRange, "queries")
        found = self._all("attend", query.numpy(), float(scale))
        return torch.from_numpy(np.concatenate(found[:: self.config.token_ranks], axis=1))

    def truncate(self, length: int) -> None:
        length = in_range(length, self.length + 1, PositionOutOfRange, "length")
        self._world.need(self._ranks)
        self._decided("be", length)
        self.length = length

    def clear(self) -> None:
        self.truncate(0)

    def lose(self, rank: int) -> None:
        self._world.kill(self._number(rank))

    def lose_in_append(self, rank: int) -> None:
        self._failing.add(self._number(rank))

    def _all(self, name: str, *args: Any) -> list[Any]:
        return self._world.ask(self._ranks, name, self._id, *args)

    def _decided(self, name: str, *args: Any) -> None:
        """Run the part of a call after the commit point: remaining ranks complete it, and the next call reports the lost ones."""
        with suppress(RankLost):
            self._all(name, *args)

    def _one(self, rank: int, name: str) -> Any:
        (answer,) = self._world.ask([self._number(rank)], name, self._id)
        return answer

    def _number(self, rank: int) -> int:
        number = in_range(rank, len(self._ranks), RankOutOfRange, "rank")
        self._world.need([number])
        return number


BACKEND = kvref.backend("reference:torch")
# The caches of a world share the pipes to its ranks, in which the replies to calls of several threads would mix.
ONE_THREAD: dict[str, Any] = {"threads": False}


class TorchDistributed:
    """delays: seconds before each reply, by rank."""

    version = torch.__version__
    language = "python"
    project = "kvref"  # the reference, distributed with torch
    level: Level = "exact"
    formats: tuple[str, ...] = ("float32", "float16", "bfloat16")

    def __init__(self, delays: dict[int, float] | None = None) -> None:
        self.delays = delays or {}
        self._worlds: dict[int, World] = {}

    def asarray(self, values: Any) -> Any:
        return torch.from_numpy(values.astype(np.float32)).bfloat16() if values.dtype.name == "bfloat16" else torch.tensor(values)

    def to_numpy(self, array: Any) -> Any:
        return (array.float() if array.dtype == torch.bfloat16 else array).numpy()

    def sharded(self, **config: Any) -> TorchShardedCache:
        sizes = kvref.ShardedConfig(**config)
        world = self._worlds.get(sizes.num_ranks)
        if world is None or world.lost:
            world = self._worlds[sizes.num_ranks] = World(sizes.num_ranks, self.delays)
        return TorchShardedCache(sizes, world)


class TorchDistributedGrid(TorchDistributed):
    name = "torch-distributed"
    limits: ClassVar[Any] = ONE_THREAD | {"sharded": {"head_ranks": [1, 2], "token_ranks": [1, 2]}}


class TorchDistributedHeads(TorchDistributed):
    name = "torch-distributed-heads"
    limits: ClassVar[Any] = ONE_THREAD | {"sharded": {"head_ranks": [1, 2, 3, 4], "token_ranks": 1}}


class TorchDistributedTokens(TorchDistributed):
    name = "torch-distributed-tokens"
    limits: ClassVar[Any] = ONE_THREAD | {"sharded": {"head_ranks": 1, "token_ranks": [1, 2, 3, 4]}}
