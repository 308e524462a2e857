"""Which ordered pairs of changing operations a call trace contains: B directly after A, with nothing read between.

If A defers work until something is read, a bug in that work can show only if B is called first.
"""

from collections.abc import Iterable
from functools import cache
from itertools import product

from kvref_conformance.calls.messages import CallRequest, Exchange, referenced_ids, result_names
from kvref_conformance.calls.operation_table import operations
from kvref_conformance.families import all_families
from kvref_conformance.oracle.formats import PLAIN_FORMATS

# Methods that change nothing. Attributes change nothing either.
READS = frozenset((
    "ancestors", "apply", "attend", "attend_source", "block_table", "block_tables", "gather", "gather_batch", "heads",
    "length", "lengths", "lookup", "match", "num_bytes", "places", "positions", "raw", "read", "read_head",
    "read_index", "read_inputs", "read_matrix", "read_rank", "read_rows", "read_source", "read_state", "read_token",
    "read_tokens", "read_window", "records", "references", "save", "select", "send", "slot_mapping", "source_length",
    "stats", "tier_of", "values",
))  # fmt: skip
ENDS = frozenset(("drop", "close", "free", "release", "reset", "clear", "fence"))  # any sequence can reuse the memory
# The state of the sequences or of their object, by an operation that came earlier.
EARLIER = {"fork": "after a fork", "release_before": "after a release", "begin": "with a prefix", "commit": "with a prefix"}

# Of the transfer cache: the calls that can name what a call has created or named (an aborted transfer has no sequence).
OF_A_SEQUENCE = ("append", "truncate", "drop", "export")
AFTER_IN_TRANSFER = {
    **dict.fromkeys(("create", "commit"), OF_A_SEQUENCE), **dict.fromkeys(("begin", "arrive"), ("arrive", "commit", "abort")),
    **dict.fromkeys(("abort", "write_late"), ("fence", "write_late")),
    **dict.fromkeys(("append", "truncate", "export"), (*OF_A_SEQUENCE, "release")),
}  # fmt: skip

Pair = tuple[str, str]


@cache
def changing_operations(family: str) -> frozenset[str]:
    """The operations of a family, and of the objects that it returns, that change something: "paged.write"."""
    names = (family, *getattr(all_families()[family].interface, "HANDED_OUT", {}))
    return frozenset(
        f"{each}.{name}" for each in names for name, op in operations(each).items() if not op.attribute and name not in READS
    )


def all_pairs(family: str) -> set[Pair]:
    changing = changing_operations(family)
    return set(product(changing, changing))


def why_impossible(pair: Pair) -> str:
    """Why no call sequence contains the pair; empty if one can."""
    family, (first, second) = pair[0].partition(".")[0], (op.partition(".")[2] for op in pair)
    if family == "prefix" and "load" in (first, second):
        return "the model does not cover hits after load"
    if family in ("prefix", "grouped", "recurrent") and second == "reset" and first not in ("drop", "reset"):
        return "reset raises while a sequence is live"
    if family in ("prefix", "grouped", "recurrent") and first == "reset" and second not in ("create", "begin", "reset"):
        return "after reset there is no sequence"
    if family == "sharded" and first == "lose" and second in ("append", "clear", "truncate"):
        return "the call raises RankLost"
    if family == "engine" and first == "open" and second in ("generate", "sample", "cancel", "step"):
        return "an empty session cannot generate"
    if family == "transfer" and second not in (*AFTER_IN_TRANSFER.get(first, (second,)), "create", "begin", "expire"):
        return "the calls name different objects"
    if family == "tree" and (first, second) == ("create", "accept"):
        return "a new sequence has no tree"
    return ""


def pairs_in(family: str, call_trace: Iterable[Exchange]) -> dict[Pair, set[str]]:
    """The pairs of successful calls in a call trace, each with the states (see EARLIER) in which its sequences were.

    A and B have a sequence in common, or sequences that descend from one by forks; or one of them names none, because it creates
    a sequence or changes the object as a whole; or A frees the memory of one.
    """
    changing, found = changing_operations(family), dict[Pair, set[str]]()
    ancestors, states = dict[int, int](), dict[int, set[str]]()
    before: CallRequest | None = None
    for exchange in call_trace:
        request = exchange.request
        of_none = request.args.get("sequences") == []  # a batch of no sequences changes nothing
        if request.op not in changing or of_none or exchange.reply is None or exchange.reply.error:
            if request.name == "new":
                formats = {request.args.get(name) for name in all_families()[request.family].formats} - {None}
                states[request.id] = {"with scales"} if formats - {*PLAIN_FORMATS} else set()
            before = None
            continue
        named = {ancestors[each] for each in referenced_ids(request) if each in ancestors}
        if request.op in result_names():
            ancestors[request.id] = min(named, default=request.id)
        about = named | {ancestors.get(request.id, 0), request.on or 0}
        if before:
            others = {ancestors[each] for each in (before.id, *referenced_ids(before)) if each in ancestors}
            if not named or not others or named & others or before.name in ENDS:
                held = set[str]().union(*(states.get(each, set()) for each in about | others))
                lists = [each for call in (before, request) for each in call.args.values() if isinstance(each, list)]
                batch = {"with a batch"} if any(len(each) > 1 for each in lists) else set[str]()
                found.setdefault((before.op, request.op), set()).update(held | batch)
        if request.name in EARLIER:
            for each in named | {ancestors.get(request.id, 0)}:
                states.setdefault(each, set()).add(EARLIER[request.name])
        before = request
    return found
