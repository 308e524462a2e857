"""EDIT: the quantized cache goes back, in every layer."""

from kvref_conformance.checking.expect import equal, pair, raises
from kvref_conformance.checking.registry import check
from kvref_conformance.checking.setup import at_least, formats_of, held, new, pair_of_tokens
from kvref_conformance.conversation.handle import Handle
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.quantized.checks import LOUD, QUIET, Pair, layer_is, lengths
from kvref_conformance.oracle.formats import SYMMETRIC


def step(subject: Subject, layers: int, loud: float = 1.0) -> Pair:
    """A token for every layer."""
    keys, values = (held(subject, part * loud) for part in pair_of_tokens(subject, layers))
    return keys, values


def stepped(subject: Subject, count: int, **config: str) -> tuple[Handle, list[Pair]]:
    """A cache with so many tokens in every layer, and the tokens."""
    cache = new(subject, "quantized", **config)
    at_least(cache, capacity=count)
    steps = [step(subject, cache.config["num_layers"]) for _ in range(count)]
    given(cache, steps)
    return cache, steps


def given(cache: Handle, steps: list[Pair]) -> None:
    for each in steps:
        cache.append_step(*each)


def layers_are(subject: Subject, cache: Handle, steps: list[Pair], when: str) -> None:
    """All that every layer holds came in these steps."""
    layers = cache.config["num_layers"]
    equal(lengths(cache), [len(steps)] * layers, f"lengths {when}")
    for layer in range(layers if steps else 0):
        layer_is(subject, cache, layer, steps, when)


@check("EDIT-01", "quantized")
def the_first_tokens_of_every_layer_stay(subject: Subject) -> None:
    for name in formats_of(subject, "format", *SYMMETRIC):
        cache, steps = stepped(subject, 7, format=name)
        for length in (6, 3, 0):
            layers, every = range(cache.config["num_layers"] if length else 0), list(range(length))
            before = [cache.read_tokens(layer, every) for layer in layers]
            cache.truncate(length)
            layers_are(subject, cache, steps[:length], f"of a {name} cache after truncate({length})")
            for layer in layers:
                pair(cache.read_tokens(layer, every), before[layer], f"layer {layer}, before truncate({length}) and after")


@check("EDIT-01", "quantized")
def what_went_cannot_be_read(subject: Subject) -> None:
    cache, _ = stepped(subject, 5)
    for length in (3, 0):
        cache.truncate(length)
        for layer in range(cache.config["num_layers"]):
            for position in (length, 4):
                with raises("PositionOutOfRange"):
                    cache.read_token(layer, position)


@check("EDIT-01", "quantized")
def layers_of_any_length_are_cut_to_one(subject: Subject) -> None:
    subject.need(num_layers=2)
    for name in formats_of(subject, "format", *SYMMETRIC):
        cache, steps = stepped(subject, 4, format=name)
        cache.append(1, *pair_of_tokens(subject, 3))
        cache.truncate(4)
        layers_are(subject, cache, steps, f"of a {name} cache of which layer 1 had 3 tokens more, after truncate(4)")


@check("EDIT-02", "quantized")
def no_more_tokens_stay_than_the_shortest_layer_has(subject: Subject) -> None:
    cache, steps = stepped(subject, 5)
    for length in subject.integers(6, cache.config["capacity"], cache.config["capacity"] + 1, -1, -5, -6):
        with raises("PositionOutOfRange"):
            cache.truncate(length)
        layers_are(subject, cache, steps, f"after truncate({length}) of 5 was refused")
    cache.truncate(5)
    layers_are(subject, cache, steps, "after truncate(5) of 5")


@check("EDIT-02", "quantized")
def the_shortest_layer_says_how_many_may_stay(subject: Subject) -> None:
    subject.need(num_layers=2)
    for longer in (0, 1):
        cache, _ = stepped(subject, 2)
        cache.append(longer, *pair_of_tokens(subject, 3))
        before = lengths(cache)
        with raises("PositionOutOfRange"):
            cache.truncate(3)
        equal(lengths(cache), before, f"lengths after truncate(3) was refused, of 2 tokens and 5 in layer {longer}")


@check("EDIT-03", "quantized")
def what_follows_is_as_if_nothing_had_gone(subject: Subject) -> None:
    """Whatever the tokens that went were: louder than all others, or quieter."""
    for name in formats_of(subject, "format", *SYMMETRIC):
        for loud in (float(LOUD), float(QUIET)):
            cache, steps = stepped(subject, 4, format=name)
            at_least(cache, capacity=8)
            layers = cache.config["num_layers"]
            for draft, length, more in ((2, 4, 1), (1, 2, 3), (3, 0, 2), (2, 3, 1)):  # of the last one a token is taken
                drafted = [step(subject, layers, loud) for _ in range(draft)]
                given(cache, drafted)
                cache.truncate(length)
                steps = (steps + drafted)[:length] + [step(subject, layers) for _ in range(more)]
                given(cache, steps[length:])
                never = new(subject, "quantized", format=name)
                given(never, steps)
                when = f"of a {name} cache after a draft of {draft}, truncate({length}) and {more} more"
                layers_are(subject, cache, steps, when)
                for layer in range(layers):
                    every = list(range(len(steps)))
                    got, want = cache.read_tokens(layer, every), never.read_tokens(layer, every)
                    pair(got, want, f"layer {layer} {when}, against a cache without that draft")


@check("EDIT-03", "quantized")
def a_full_cache_that_went_back_is_filled_again(subject: Subject) -> None:
    cache = new(subject, "quantized", capacity=4)
    layers, capacity = cache.config["num_layers"], cache.config["capacity"]
    steps = [step(subject, layers) for _ in range(capacity)]
    given(cache, steps)
    cache.truncate(1)
    steps = steps[:1] + [step(subject, layers) for _ in range(capacity - 1)]
    given(cache, steps[1:])
    layers_are(subject, cache, steps, "of a full cache that was truncated to 1, and filled again")
    with raises("CapacityExceeded"):
        cache.append_step(*step(subject, layers))
