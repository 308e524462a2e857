"""The shape of a call trace: its calls without their arguments. It shows that two failures are alike."""

import json
from collections.abc import Iterable, Sequence

from kvref_conformance.calls.messages import Exchange

Shape = tuple[str, ...]  # the calls in order, as "paged.write", with a "!" if the call raised


def shape_of(trace: Sequence[str]) -> Shape:
    """The shape of a trace: its calls and which of them raise, without their arguments."""
    messages = [json.loads(line) for line in trace[1:]]
    return tuple(
        shape_entry(request["op"], "error" in reply.get("got", reply))
        for request, reply in zip(messages[::2], messages[1::2], strict=True)
    )


def shape_of_exchanges(call_trace: Iterable[Exchange]) -> Shape:
    """The shape of recorded calls, including quiet ones."""
    return tuple(shape_entry(each.request.op, each.reply is not None and each.reply.error is not None) for each in call_trace)


def shape_entry(op: str, raised: bool) -> str:
    return f"{op}!" if raised else op


def is_subsequence(short: Shape, long: Shape) -> bool:
    """Whether `short` is a subsequence of `long`."""
    left = iter(long)
    return all(call in left for call in short)
