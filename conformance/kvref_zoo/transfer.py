"""Wrong transfers between caches."""

from typing import Any

import kvref
from kvref_zoo.mutant import mutant


@mutant("TRANSFER-07", also="TRANSFER-06 TRANSFER-08", seen_in="sgl-project/sglang#32564")
class TransferAbortFreesBlocks(kvref.TransferCache):
    """`abort` frees the blocks at once. A write that is still in flight overwrites the tokens of their next owner."""

    def abort(self, transfer: int) -> None:
        super().abort(transfer)
        self.pool.free_many(self._tables.held(self._aborted[int(transfer)].table))

    def fence(self, transfer: int) -> None:
        number = self._known(transfer, self._aborted)
        self._tables.close(self._aborted.pop(number).table)


@mutant("TRANSFER-03")
class TransferCountsRows(kvref.TransferCache):
    """`commit` compares the number of rows that have arrived, and a row that arrives twice counts twice."""

    def __init__(self, config: kvref.TransferConfig) -> None:
        super().__init__(config)
        self._counts: dict[int, int] = {}

    def arrive(self, transfer: Any, layer: Any, start: Any, heads: Any, keys: Any, values: Any) -> None:
        found = self._open[self._known(transfer, self._open)]
        self._write(*self._part(found, layer, start, heads, keys, values))
        self._counts[int(transfer)] = self._counts.get(int(transfer), 0) + keys.shape[0] * keys.shape[1]

    def commit(self, transfer: int) -> int:
        arrived = self._open[self._known(transfer, self._open)].arrived
        arrived[...] = self._counts.get(int(transfer), 0) >= arrived.size
        return super().commit(transfer)


@mutant("TRANSFER-04", also="LAW-19 TRANSFER-03", seen_in="sgl-project/sglang#30233")
class TransferCommitsWhatIsThere(kvref.TransferCache):
    """`commit` succeeds before all rows have arrived: the sequence contains what the blocks contained before."""

    def commit(self, transfer: int) -> int:
        self._open[self._known(transfer, self._open)].arrived[...] = True
        return super().commit(transfer)


@mutant("TRANSFER-08")
class TransferCommitsAfterTheDeadline(kvref.TransferCache):
    """A transfer whose rows have all arrived does not expire, and is committed after its deadline."""

    def expire(self, now: int) -> list[int]:
        complete = {number: found for number, found in self._open.items() if found.arrived.size and found.arrived.all()}
        for number in complete:
            del self._open[number]
        try:
            return super().expire(now)
        finally:
            self._open = dict(sorted((self._open | complete).items()))


@mutant("TRANSFER-09", also="TRANSFER-07 TRANSFER-10 TRANSFER-11", seen_in="ai-dynamo/dynamo#826")
class TransferExportHoldsNothing(kvref.TransferCache):
    """An export does not hold its blocks: what is sent is what their next owner has written."""

    def export(self, sequence: int) -> int:
        handle = super().export(sequence)
        self.pool.free_many(self._tables.held(self._exports[handle]))
        return handle

    def release(self, handle: int) -> None:
        table = self._export(handle)
        del self._exports[int(handle)]
        self._tables.close(table)


@mutant("TRANSFER-10", seen_in="vllm-project/vllm#52234")
class TransferHandleOutlivesItsRelease(kvref.TransferCache):
    """A released handle still sends: the rows of the present owner of the blocks."""

    def __init__(self, config: kvref.TransferConfig) -> None:
        super().__init__(config)
        self._released: dict[int, int] = {}

    def release(self, handle: int) -> None:
        table = self._tables.fork(self._export(handle))
        super().release(handle)
        self._released[int(handle)] = table

    def send(self, handle: Any, layer: Any, tokens: Any, heads: Any) -> Any:
        if handle not in self._released:
            return super().send(handle, layer, tokens, heads)
        self._exports[handle] = self._released[handle]
        try:
            return super().send(handle, layer, tokens, heads)
        finally:
            del self._exports[handle]


@mutant("TRANSFER-07", also="TRANSFER-06 TRANSFER-08", seen_in="vllm-project/vllm#46283")
class TransferKeepsAbortedBlocks(kvref.TransferCache):
    """The blocks of an aborted transfer are never freed."""

    def fence(self, transfer: int) -> None:
        self._tables.close(self._aborted.pop(self._known(transfer, self._aborted)).table)


@mutant(
    "TRANSFER-11",
    also="LAW-17 TRANSFER-02 TRANSFER-05 TRANSFER-07 TRANSFER-09 TRANSFER-10 TRANSFER-12",
    seen_in="vllm-project/vllm#37940",
)
class TransferReadsAnotherLayout(kvref.TransferCache):
    """`send` reads the memory of a part as if the heads of a token were not adjacent, but the tokens of a head (HND, not NHD)."""

    def send(self, handle: Any, layer: Any, tokens: Any, heads: Any) -> Any:
        return tuple(part.swapaxes(0, 1).reshape(part.shape) for part in super().send(handle, layer, tokens, heads))


@mutant("TRANSFER-11", also="TRANSFER-09", seen_in="sgl-project/sglang#23746")
class TransferSendsTheFirstHeads(kvref.TransferCache):
    """Every rank of the receiver gets the first heads, whichever it has asked for."""

    def send(self, handle: Any, layer: Any, tokens: Any, heads: Any) -> Any:
        count = len(super().send(handle, layer, tokens, heads)[0][0]) if tokens[1] > tokens[0] else heads[1] - heads[0]
        return super().send(handle, layer, tokens, [0, count])


@mutant("TRANSFER-06", also="TRANSFER-07 TRANSFER-08", seen_in="vllm-project/vllm#25562")
class TransferLateMessageIsFatal(kvref.TransferCache):
    """A part, an abort or a commit of a transfer that has ended raises KeyError, which ends the engine."""

    def _known(self, transfer: Any, among: Any) -> int:
        if isinstance(transfer, int) and 0 <= transfer < self._next_transfer and transfer not in among:
            raise KeyError(transfer)
        return super()._known(transfer, among)
