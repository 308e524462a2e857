"""Checks of LAW-18: windows of production sizes, which must not be a token too long or too short."""

from collections.abc import Iterator, Sequence

from kvref_conformance.arrays import NDArray
from kvref_conformance.checking.attending import LOUD_SCALE, exact, looking_at, loud_at_ends
from kvref_conformance.checking.content import VALUES, Written, belongs, content, pair_of_content
from kvref_conformance.checking.expect import equal, shaped, within
from kvref_conformance.checking.real import affordable
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import at_least, new
from kvref_conformance.conversation.handle import Handle
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.windowed.checks import shown
from kvref_conformance.oracle.attention import seen

APPENDED = 400  # tokens; larger steps, up to the window's length, are appended without queries


@check("LAW-18", "windowed")
def a_ring_turns_over_many_times(subject: Subject) -> None:
    for window, sinks, rollback in ((512, 0, 0), (500, 4, 7), (128, 1, 0)):
        turning_over(subject, 1, 64, window, sinks, rollback, (1, 127, 129, 300, 511, 1, 1, 16, 600, 1))


@check("LAW-18", "windowed", real=True)
def a_ring_of_a_model_turns_over(subject: Subject) -> None:
    for window, sinks, rollback in ((4096, 0, 0), (4096, 4, 8), (1023, 128, 0)):
        turning_over(subject, 8, 128, window, sinks, rollback, (1, 127, 2048, 1919, 1, 1, 16, 4097, 1, 5000, 1))


def turning_over(
    subject: Subject, heads: int, dim: int, window: int, sinks: int, rollback: int, pieces: Sequence[int]
) -> None:  # fmt: skip
    cache = new(subject, "windowed", num_kv_heads=heads, head_dim=dim, window=window, sinks=sinks, rollback=rollback)
    config, at = cache.config, 0
    written = Written(config["num_kv_heads"], config["head_dim"])
    for count in (affordable(subject, each, len(pieces)) for each in pieces):
        cache.append(*pair_of_content(0, 0, range(at, at + count), written.heads, written.dim))
        at += count
        written.up_to(0, 0, at)
        holds(cache, at, written)
        if config["rollback"] and count > 1:
            cache.append(*pair_of_content(1, 0, range(at, at + config["rollback"]), written.heads, written.dim))
            written.up_to(1, 0, at + config["rollback"])
            cache.truncate(at)
            holds(cache, at, written)


def holds(cache: Handle, length: int, written: Written) -> None:
    """Raises Broken unless `read` returns every token that the next query sees."""
    equal(cache.length, length, "length")
    needed = [int(at) for at in view(cache, length) if at < length]
    belongs(cache.read(needed), 0, 0, needed, written)


def view(cache: Handle, query: int) -> NDArray:
    return seen(query, *(cache.config[name] for name in ("window", "sinks", "chunk")))


@check("LAW-18", "windowed")
def windows_end_where_they_should(subject: Subject) -> None:
    for sizes in ({"window": 512}, {"window": 130, "sinks": 4}, {"window": 255, "chunk": 255}):
        ends_of_views(subject, 1, 64, sizes, (140, 350, 20, 1, 16, 700, 1, 1, 65))


@check("LAW-18", "windowed", real=True)
def windows_of_models_end_where_they_should(subject: Subject) -> None:
    for sizes in ({"window": 4096}, {"window": 1024, "sinks": 4}, {"window": 8192, "chunk": 8192}, {"window": 4095}):
        ends_of_views(subject, 2, 128, sizes, (3900, 300, 1, 1, 3900, 200, 64, 1, 1400, 33))


def ends_of_views(subject: Subject, heads: int, dim: int, sizes: dict[str, int], pieces: Sequence[int]) -> None:
    """Checks for some queries of each step that their views begin and end at the right positions."""
    cache = new(subject, "windowed", num_kv_heads=heads, head_dim=dim, **sizes)
    at_least(cache, **sizes)
    heads, dim, group = cache.config["num_kv_heads"], cache.config["head_dim"], subject.size("group_size", 2)
    steps = list(portions([affordable(subject, each, len(pieces)) for each in pieces]))
    chosen = [at for step in steps for at in looked_at(step)][:dim]
    views = {at: view(cache, at) for at in chosen}
    keys = loud_at_ends(steps[-1].stop, heads, dim, list(views.values()))
    values = content(0, 0, range(len(keys)), heads, dim, VALUES)
    for step in steps:
        given = keys[step.start : step.stop], values[step.start : step.stop]
        if APPENDED < len(step) <= cache.config["window"]:
            cache.append(*given)
            continue
        query = looking_at([chosen.index(at) if at in views else None for at in step], group * heads, dim)
        got = shaped(
            cache.step(query, *given, LOUD_SCALE), query.shape, f"attention of a step of {len(step)} tokens after {step.start}"
        )
        for at in (each for each in chosen if each in step):
            row = slice(at - step.start, at - step.start + 1)
            want, bound = exact(subject, query[row], keys, values, scale=LOUD_SCALE, views=[views[at]])
            seen_there = f"attention of position {at} over {shown(views[at])}, in a step of {len(step)} tokens after {step.start}"
            within(got[row], want, bound, seen_there)


def portions(sizes: Sequence[int]) -> Iterator[range]:
    """Yields the positions of each step."""
    at = 0
    for size in sizes:
        yield range(at, at + size)
        at += size


def looked_at(step: range) -> list[int]:
    """Returns the positions of the queries to check: at the ends of the step and of kernel tiles, and in the middle."""
    rows = {0, 1, 63, 64, 255, 256, len(step) // 2, len(step) - 2, len(step) - 1}
    return [step.start + row for row in sorted(rows) if 0 <= row < len(step)]
