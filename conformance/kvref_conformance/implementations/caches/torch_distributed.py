"""A sharded cache over `torch.distributed`: each rank a process, gloo between them, in the grids that two to four ranks make.

PyTorch has no cache of its own that is sharded. What is judged is what engines make of its parts: a process a rank, `all_reduce`
by which the ranks agree that all are there, and `all_gather` of outputs and log-sum-exps within a row. A process that ends is a
rank that is lost: gloo says so to those that wait for it, and the pipe to whoever asks.
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
from kvref.inputs import accept_pair
from kvref_conformance.implementations.caches import torch_rank
from kvref_conformance.interface import Level

ANSWERED = 8.0  # seconds in which a rank answers, the time included that it may wait for others
_FORK = multiprocessing.get_context("forkserver")  # a process that has imported PyTorch once is where all ranks come from
_FORK.set_forkserver_preload([torch_rank.__name__])


class World:
    """Processes that found each other: ranks of one number. Several caches may lie on them."""

    def __init__(self, size: int, delays: dict[int, float]) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="kvref-ranks-")
        ends = [_FORK.Pipe() for _ in range(size)]
        self.pipes = [own for own, _ in ends]
        store = str(Path(self.folder.name) / "store")
        self.processes = [
            _FORK.Process(target=torch_rank.serve, args=(end, number, size, store, delays.get(number, 0.0)), daemon=True)
            for number, (_, end) in enumerate(ends)
        ]
        for process, (_, end) in zip(self.processes, ends, strict=True):
            process.start()
            end.close()
        self.lost: set[int] = set()
        self.numbers, self.forgotten = itertools.count(), list[int]()  # of caches
        weakref.finalize(self, _ended, self.processes, self.folder)
        self._answers(range(size))
        self.folder.cleanup()  # all have met, and made every group that they need

    def ask(self, ranks: Iterable[int], name: str, cache: int, *args: Any) -> list[Any]:
        """What these ranks answer. Raises RankLost, once all that are left have answered."""
        return self.ask_each(dict.fromkeys(ranks, args), name, cache)

    def ask_each(self, args: dict[int, Any], name: str, cache: int) -> list[Any]:
        """The same with arguments of its own for each rank."""
        self.need(args)
        for rank, own in args.items():
            try:
                self.pipes[rank].send((name, cache, own))
            except OSError:
                self.lost.add(rank)
        if self.lost.intersection(args):
            self._stop(set(args) - self.lost)  # behind what they are asked: before that it would be passed over
        return self._answers(args)

    def _answers(self, ranks: Iterable[int]) -> list[Any]:
        answers: dict[int, Any] = {}
        missing, until = set(ranks) - self.lost, monotonic() + ANSWERED
        while missing:
            ready = wait([self.pipes[rank] for rank in missing], max(0.0, until - monotonic()))
            for rank in [rank for rank in missing if self.pipes[rank] in ready or not ready]:
                missing.discard(rank)
                if not ready:
                    self.kill(rank)  # what it might still say would be taken for the answer to something else
                    continue
                try:
                    answers[rank] = self.pipes[rank].recv()
                except (EOFError, OSError):
                    self.lost.add(rank)
                    self._stop(missing)
        self.need(ranks)
        if any(isinstance(each, str) for each in answers.values()):  # torch_rank.LOST
            raise RankLost("ranks: expected all to take part within the time limit, got some that did not")
        return [answers[rank] for rank in ranks]

    def _stop(self, waiting: Iterable[int]) -> None:
        """Let these not wait for one that has ended."""
        for rank in waiting:
            with suppress(OSError):
                self.pipes[rank].send((torch_rank.STOP, 0, ()))

    def need(self, ranks: Iterable[int]) -> None:
        """Raises RankLost where one of these is."""
        if gone := sorted(self.lost.intersection(ranks)):
            raise RankLost(f"ranks: expected those that are needed, got none of {gone}, whose processes have ended")

    def kill(self, rank: int) -> None:
        """End a rank's process."""
        self.processes[rank].kill()
        self.processes[rank].join()
        self.lost.add(rank)


def _ended(processes: list[Any], folder: Any) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
    folder.cleanup()


class Cache:
    def __init__(self, config: kvref.ShardedConfig, world: World) -> None:
        self.config, self.length = config, 0
        self._world, self._failing = world, set[int]()
        self._id = next(world.numbers)
        self._ranks = range(config.num_ranks)
        while world.forgotten:
            world.ask(self._ranks, "forget", world.forgotten.pop())
        weakref.finalize(self, world.forgotten.append, self._id)  # and nothing is asked where Python happens to collect it
        world.ask_each(dict.fromkeys(self._ranks, vars(config)), "new", self._id)

    def append(self, keys: Any, values: Any) -> None:
        shape = "n", self.config.num_kv_heads, self.config.head_dim
        keys, values = accept_pair(keys, values, shape, BACKEND)
        count = len(keys)
        if self.length + count > self.config.max_tokens:
            raise CapacityExceeded(f"append: expected at most {self.config.max_tokens} tokens, got {self.length + count}")
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
        """What all were there for when it began: who is left does it, and the next call says who is not."""
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


class Distributed:
    """delays: by rank, seconds that it waits before each answer."""

    version = torch.__version__
    language = "python"
    project = "kvref"  # its reference, in processes that torch puts together
    level: Level = "exact"
    formats: tuple[str, ...] = ("float32", "float16", "bfloat16")

    def __init__(self, delays: dict[int, float] | None = None) -> None:
        self.delays = delays or {}
        self._worlds: dict[int, World] = {}

    def asarray(self, values: Any) -> Any:
        return torch.from_numpy(values.astype(np.float32)).bfloat16() if values.dtype.name == "bfloat16" else torch.tensor(values)

    def to_numpy(self, array: Any) -> Any:
        return (array.float() if array.dtype == torch.bfloat16 else array).numpy()

    def sharded(self, **config: Any) -> Cache:
        sizes = kvref.ShardedConfig(**config)
        world = self._worlds.get(sizes.num_ranks)
        if world is None or world.lost:
            world = self._worlds[sizes.num_ranks] = World(sizes.num_ranks, self.delays)
        return Cache(sizes, world)


class Grid(Distributed):
    name = "torch-distributed"
    limits: ClassVar[Any] = {"sharded": {"head_ranks": [1, 2], "token_ranks": [1, 2]}}


class Heads(Distributed):
    name = "torch-distributed-heads"
    limits: ClassVar[Any] = {"sharded": {"head_ranks": [1, 2, 3, 4], "token_ranks": 1}}


class Tokens(Distributed):
    name = "torch-distributed-tokens"
    limits: ClassVar[Any] = {"sharded": {"head_ranks": 1, "token_ranks": [1, 2, 3, 4]}}
