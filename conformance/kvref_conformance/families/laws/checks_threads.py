"""Checks of LAW-21 on caches. The checks of functions are in the families of functions."""

from contextlib import suppress
from functools import partial

from kvref_conformance.exceptions import NotOffered
from kvref_conformance.implementation_api import NDArray
from kvref_conformance.testlib.law_adapter import MANY_TOKENS, LawAdapter, overrides
from kvref_conformance.testlib.registry import law
from kvref_conformance.testlib.thread_stress import NUM_THREADS, Calls, assert_threads_do_not_interfere, require_threads


@law("LAW-21b")
def caches_of_different_threads_are_independent(stream: LawAdapter) -> None:
    """Each thread fills and reads its own cache. The numbers of tokens differ, and with them the sizes of shared memory."""
    require_threads(stream.subject)
    attends, calls = overrides(type(stream), "attend_arguments"), list[list[Calls]]()

    def fill(own: LawAdapter, keys: NDArray, values: NDArray) -> list[NDArray]:
        with suppress(NotOffered):
            own.clear()
            own.append(keys, values)
        return []

    def attend(own: LawAdapter, query: NDArray) -> list[NDArray]:
        with suppress(NotOffered):
            return [own.cache.attend(*own.attend_arguments(), query, 1.0)]
        return []

    for thread in range(NUM_THREADS):
        own, (keys, values) = stream.new_cache(), stream.tokens(MANY_TOKENS - thread % 2)
        own.append(keys, values)
        calls.append([partial(fill, own, keys, values), own.read])
        calls[-1] += [partial(attend, own, own.query())] if attends else []
    assert_threads_do_not_interfere(stream.subject, calls, "the contents of a cache, and attention over them,")
