"""Checks of EDIT for the quantized cache: `truncate` of every layer."""

from kvref_conformance.checking.expect import equal, pair, raises
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import at_least, held, made, new, pair_of_tokens
from kvref_conformance.conversation.handle import Handle
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.quantized.checks import LOUD, QUIET, Pair, lengths
from kvref_conformance.families.quantized.stream import formats_of_tokens


def step(subject: Subject, layers: int, loud: float = 1.0) -> Pair:
    """Returns one token per layer."""
    keys, values = (held(subject, part * loud) for part in pair_of_tokens(subject, layers))
    return keys, values


def stepped(subject: Subject, count: int, **config: str) -> tuple[Handle, list[Pair]]:
    """Returns a cache after `count` steps, and the steps."""
    cache = new(subject, "quantized", **config)
    at_least(cache, capacity=count)
    steps = [step(subject, cache.config["num_layers"]) for _ in range(count)]
    given(cache, steps)
    return cache, steps


def given(cache: Handle, steps: list[Pair]) -> None:
    for each in steps:
        cache.append_step(*each)


def held_by(cache: Handle, count: int) -> list[Pair]:
    """Returns the first `count` tokens that each layer reads as."""
    return [cache.read_tokens(layer, list(range(count))) for layer in range(cache.config["num_layers"] if count else 0)]


def holds(cache: Handle, want: list[Pair], count: int, when: str) -> None:
    """Raises Broken unless every layer has `count` tokens and reads as `want`."""
    equal(lengths(cache), [count] * cache.config["num_layers"], f"lengths {when}")
    for layer, read in enumerate(held_by(cache, count)):
        pair(read, want[layer], f"layer {layer} {when}")


@check("EDIT-01ac", "quantized")
def the_first_tokens_of_every_layer_stay(subject: Subject) -> None:
    for name in formats_of_tokens(subject):
        cache, _ = stepped(subject, 7, format=name)
        for length in (6, 3, 0):
            before = held_by(cache, length)
            cache.truncate(length)
            holds(cache, before, length, f"of a {name} cache after truncate({length}), compared with before")


@check("EDIT-01bc", "quantized")
def what_went_cannot_be_read(subject: Subject) -> None:
    cache, _ = stepped(subject, 5)
    for length in (3, 0):
        cache.truncate(length)
        for layer in range(cache.config["num_layers"]):
            for position in (length, 4):
                with raises("PositionOutOfRange"):
                    cache.read_token(layer, position)


@check("EDIT-01a", "quantized")
def layers_of_any_length_are_cut_to_one(subject: Subject) -> None:
    subject.need(num_layers=2)
    for longer in (0, 1):
        cache, _ = stepped(subject, 4)
        at_least(cache, capacity=7)
        cache.append(longer, *pair_of_tokens(subject, 3))
        before = held_by(cache, 3)
        cache.truncate(3)
        holds(cache, before, 3, f"after truncate(3) of 4 tokens and 7 in layer {longer}")


@check("EDIT-02ab", "quantized")
def no_more_tokens_stay_than_there_are(subject: Subject) -> None:
    cache, _ = stepped(subject, 5)
    capacity, before = cache.config["capacity"], held_by(cache, 5)
    for length in subject.integers(6, max(6, capacity), capacity + 1, -1, -5, -6):
        with raises("PositionOutOfRange"):
            cache.truncate(length)
        holds(cache, before, 5, f"after a rejected truncate({length}) of 5 tokens")
    cache.truncate(5)
    holds(cache, before, 5, "after truncate(5) of 5 tokens")


@check("EDIT-02a", "quantized")
def the_shortest_layer_says_how_many_may_stay(subject: Subject) -> None:
    subject.need(num_layers=2)
    for longer in (0, 1):
        cache, _ = stepped(subject, 2)
        at_least(cache, capacity=5)
        cache.append(longer, *pair_of_tokens(subject, 3))
        before = lengths(cache)
        with raises("PositionOutOfRange"):
            cache.truncate(3)
        equal(lengths(cache), before, f"lengths after a rejected truncate(3) of 2 tokens and 5 in layer {longer}")


@check("EDIT-03", "quantized")
def what_follows_is_as_if_nothing_had_gone(subject: Subject) -> None:
    """The removed tokens are larger, or smaller, than all others."""
    for name in formats_of_tokens(subject):
        for loud in (float(LOUD), float(QUIET)):
            cache, steps = stepped(subject, 4, format=name)
            at_least(cache, capacity=8)
            layers = cache.config["num_layers"]
            for draft, length, more in ((2, 4, 1), (1, 2, 3), (3, 0, 2), (2, 3, 1)):  # the last removes one older token
                drafted = [step(subject, layers, loud) for _ in range(draft)]
                given(cache, drafted)
                cache.truncate(length)
                steps = (steps + drafted)[:length] + [step(subject, layers) for _ in range(more)]
                given(cache, steps[length:])
                when = f"of a {name} cache after a draft of {draft}, truncate({length}) and {more} steps"
                holds(cache, never(subject, cache, steps), len(steps), f"{when}, compared with a cache without the draft")


def never(subject: Subject, cache: Handle, steps: list[Pair]) -> list[Pair]:
    """Returns what a new cache of the same sizes reads as after these steps."""
    other = made(subject, "quantized", **cache.config)
    given(other, steps)
    return held_by(other, len(steps))


@check("EDIT-03", "quantized")
def a_full_cache_that_went_back_is_filled_again(subject: Subject) -> None:
    cache = new(subject, "quantized", capacity=4)
    layers, capacity = cache.config["num_layers"], cache.config["capacity"]
    steps = [step(subject, layers) for _ in range(2 * capacity - 1)]
    given(cache, steps[:capacity])
    cache.truncate(1)
    steps = steps[:1] + steps[capacity:]
    given(cache, steps[1:])
    holds(cache, never(subject, cache, steps), capacity, "of a full cache after truncate(1) and steps until it is full again")
    with raises("CapacityExceeded"):
        given(cache, [step(subject, layers)])
