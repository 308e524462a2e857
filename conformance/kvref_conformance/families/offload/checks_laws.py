"""LAW-19, LAW-20: laws in the form that applies to this family only."""

from collections.abc import Callable, Iterator
from typing import Any

from kvref_conformance.checking.counts import tried, within_bounds
from kvref_conformance.checking.integers import REFUSED, Seen, Typed, the_same_in_any_type
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import new
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.offload.checks import FIRST


@check("LAW-19", "offload")
def free_places_are_never_more_than_there_are(subject: Subject) -> None:
    store = new(subject, "offload", capacity=3)
    total = store.config["capacity"]
    keys = [FIRST + number for number in range(total)]
    wrong: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [("prepare_store", store.prepare_store, (keys,))]
    for success in (False, False, True, True, False):
        wrong += [("complete_store", store.complete_store, (keys[:1], success)), ("complete_load", store.complete_load, (keys,))]
    wrong += [("prepare_store", store.prepare_store, ([*keys, *keys],)), ("prepare_load", store.prepare_load, (keys,))]
    wrong += [("prepare_store", store.prepare_store, ([FIRST - 1 - number],)) for number in range(total + 2)]
    for name, call, args in wrong:
        tried(call, *args)
        within_bounds([("num_free", store.num_free, total)], f"{name}{args}")


@check("LAW-20", "offload")
def keys_are_integers_of_any_type(subject: Subject) -> None:
    def script(typed: Typed) -> Iterator[Seen]:
        store = typed.new("offload", capacity=100)
        for keys in ([5, 100], [100, 120]):
            prepared = typed.call(store, "prepare_store", keys)
            yield f"prepare_store({keys})", prepared if prepared == REFUSED else [list(part) for part in prepared]
        yield "complete_store([100])", typed.call(store, "complete_store", [100])
        yield (
            "numbers of keys that lookup finds of [100] and of [100, 5]",
            (store.lookup([100]), typed.call(store, "lookup", [100, 5])),
        )
        yield "num_free", store.num_free

    the_same_in_any_type(subject, script)
