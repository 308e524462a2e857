"""One rank of a sharded cache: a process that receives requests over a pipe and communicates with other ranks over gloo."""

import os
import signal
import time
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

LIMIT = 5.0  # seconds that a rank waits for the others
STOP = "stop"  # sent to a rank that waits for others, when one of them has ended; it gets no reply
LOST = "lost"  # the reply of a rank if another rank is lost


def serve(pipe: Connection, number: int, size: int, store: str, delay: float) -> None:
    """Reply to requests until the pipe is closed. store: a file by which the ranks connect; delay: seconds before each reply."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    limit = timedelta(seconds=LIMIT)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=number, world_size=size, timeout=limit)
    rows = {columns: _rows(size // columns, columns, limit) for columns in range(1, size + 1) if size % columns == 0}
    caches: dict[int, RankShard] = {}
    pipe.send(None)
    while True:
        try:
            name, cache, args = pipe.recv()
        except EOFError:
            return
        if name == STOP:  # it was sent after this rank's last reply
            continue
        time.sleep(delay)
        try:
            if name == "new":
                row, column = divmod(number, args["token_ranks"])
                caches[cache] = RankShard(args, row, column, rows[args["token_ranks"]][row], pipe)
                pipe.send(None)
            elif name == "forget":
                pipe.send(caches.pop(cache, None) and None)
            else:
                pipe.send(getattr(caches[cache], name)(*args))
        except RuntimeError:  # another rank is lost or too slow
            pipe.send(LOST)


def _rows(rows: int, columns: int, limit: timedelta) -> list[Any]:
    """Return a group for each row of a grid. All ranks have to create all groups, in the same order."""
    return [dist.new_group(range(row * columns, (row + 1) * columns), timeout=limit, backend="gloo") for row in range(rows)]


class RankShard:
    """The rank's part of one cache.

    config: the sizes of the cache. row, column: the rank's place in the grid. group: the process group of its row.
    """

    def __init__(self, config: Mapping[str, Any], row: int, column: int, group: Any, pipe: Connection) -> None:
        self.pipe = pipe
        heads, rows = config["num_kv_heads"], config["head_ranks"]
        self.copies = max(1, rows // heads)
        self.copy = row % self.copies
        each = max(1, heads // rows)
        self.heads = range(row // self.copies * each, row // self.copies * each + each)
        self.num_heads = heads  # of all ranks
        self.column, self.group = column, group
        self.columns, self.size = config["token_ranks"], config["block_size"]
        shape = config["num_blocks"] * self.size, each, config["head_dim"]
        self.stored = [torch.zeros(shape, dtype=getattr(torch, config["dtype"])) for _ in ("keys", "values")]
        self.free = list(range(config["num_blocks"]))[::-1]
        self.table: list[int] = []
        self.length = 0
        self.coming: tuple[int, list[torch.Tensor]] = (0, [])

    def positions(self) -> list[int]:
        return self._own(0, self.length)

    def _own(self, start: int, stop: int) -> list[int]:
        return [at for at in range(start, stop) if at // self.size % self.columns == self.column]

    def _slots(self, positions: list[int]) -> torch.Tensor:
        turn = self.size * self.columns
        return torch.tensor([self.table[at // turn] * self.size + at % self.size for at in positions], dtype=torch.int64)

    def prepare(self, keys: Any, values: Any, dies: bool) -> None:
        """Select this rank's part of the new tokens and wait until every rank has its own (`all_reduce`).

        dies: kill this process before that.
        """
        count = len(keys)
        own = torch.tensor([at - self.length for at in self._own(self.length, self.length + count)], dtype=torch.int64)
        heads = slice(self.heads.start, self.heads.stop)
        parts = [torch.from_numpy(part)[own][:, heads].to(self.stored[0].dtype) for part in (keys, values)]
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        self._wait(dist.all_reduce(torch.ones(1), async_op=True))
        self.coming = count, parts

    def _wait(self, work: Any) -> None:
        """Wait for a collective operation.

        Raises RuntimeError if a rank is lost: gloo reports that only to some ranks, so the pipe is polled.
        """
        while not work.is_completed():
            if self.pipe.poll(0.0005) and self.pipe.recv()[0] == STOP:
                raise RuntimeError("a rank has ended")
        work.wait()

    def keep(self) -> None:
        count, parts = self.coming
        start = self.length
        self.be(start + count)
        slots = self._slots(self._own(start, self.length))
        for stored, part in zip(self.stored, parts, strict=True):
            stored[slots] = part
        self.coming = 0, []

    def be(self, length: int) -> None:
        """Set the length, and allocate or free blocks accordingly. All ranks decide this alike, without communication."""
        self.length = length
        needed = -(-length // (self.size * self.columns))
        while len(self.table) > needed:
            self.free.append(self.table.pop())
        while len(self.table) < needed:
            self.table.append(self.free.pop())

    def read(self) -> tuple[Any, Any]:
        keys, values = (stored[self._slots(self.positions())].float().numpy() for stored in self.stored)
        return keys, values

    def held(self) -> tuple[list[int], list[int], list[int], int]:
        """Return this rank's heads, positions and block table, and the bytes of the blocks in the table."""
        block = sum(stored[: self.size].nbytes for stored in self.stored)
        return list(self.heads), self.positions(), self.table, len(self.table) * block

    def attend(self, query: Any, scale: float) -> Any:
        """Return the attention output of the row's query heads, merged over its columns: float32 [nq, own query heads, dim]."""
        count, num_heads, dim = query.shape
        group = num_heads // self.num_heads
        start = self.heads.start * group + self.copy * group // self.copies
        # copies of a KV head divide its query heads
        stop = (self.heads.stop - 1) * group + (self.copy + 1) * group // self.copies
        found = torch.zeros(count, stop - start, dim + 1)  # outputs, and the log-sum-exp of the scores
        positions = torch.tensor(self.positions(), dtype=torch.int64)
        slots = self._slots(self.positions())
        for number in range(count if stop > start else 0):
            seen = slots[: int((positions <= self.length - count + number).sum())]  # slots are in order of positions
            found[number] = self._one(torch.from_numpy(query[number, start:stop]), seen, scale)
        if stop == start:
            return found[..., :dim].numpy()
        all_columns = [torch.zeros_like(found) for _ in range(self.columns)]
        self._wait(dist.all_gather(all_columns, found, group=self.group, async_op=True))
        outs, logs = (torch.stack(all_columns)[..., part] for part in (slice(0, dim), slice(dim, None)))
        weights = torch.exp(logs - torch.logsumexp(logs, dim=0))
        return torch.where(weights == 0, 0.0, weights * outs).sum(dim=0).numpy()

    def _one(self, query: torch.Tensor, seen: torch.Tensor, scale: float) -> torch.Tensor:
        """Attention of one query [h, dim] over the tokens in these slots: [h, dim + 1], output and log-sum-exp."""
        if not len(seen):
            return torch.cat([torch.zeros_like(query), torch.full((len(query), 1), -torch.inf)], dim=1)
        keys, values = (stored[seen].float().repeat_interleave(len(query) // len(self.heads), dim=1) for stored in self.stored)
        scores = torch.einsum("hd,nhd->hn", query, keys) * scale
        out = torch.einsum("hn,nhd->hd", torch.softmax(scores, dim=1), values)
        return torch.cat([out, torch.logsumexp(scores, dim=1, keepdim=True)], dim=1)
