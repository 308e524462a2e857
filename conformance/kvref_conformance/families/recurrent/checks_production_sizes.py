"""Checks of LAW-18: recurrent states at the sizes of models, with hundreds of sequences and checkpoints."""

from typing import Any

from kvref_conformance.calls.subject import Subject
from kvref_conformance.exceptions import NotOffered
from kvref_conformance.families.recurrent.soak_driver import SoakRecurrentCache
from kvref_conformance.testlib.assertions import assert_equal
from kvref_conformance.testlib.production_sizes import affordable_tokens, power_of_two_edges
from kvref_conformance.testlib.registry import check

# Heads, channels, num_inputs, key_dim, value_dim and the rule: Mamba-2 (130M), Qwen3-Next, LFM2 (its state is the inputs).
STATES = ((24, 64, 3, 128, 64, 0), (8, 128, 3, 128, 128, 1), (1, 2048, 2, 1, 1, 0))
SIZES = ("num_heads", "channels", "num_inputs", "key_dim", "value_dim", "delta_rule")
SMALL = (1, 4, 3, 4, 4, 0)
LAST = 10**6  # a token after a prompt, because a hit never includes the last token


def production_cache(subject: Subject, num_blocks: int, shape: tuple[int, ...] = SMALL, **sizes: Any) -> SoakRecurrentCache:
    wanted = {"num_blocks": num_blocks, "num_layers": 2, "max_drafts": 0, "interval": 16}
    return SoakRecurrentCache(subject, **wanted | dict(zip(SIZES, shape, strict=True)) | sizes)


@check("LAW-18", "recurrent")
def append_to_states_of_models_keeps_every_number(subject: Subject) -> None:
    for shape in STATES:
        cache = production_cache(subject, 1, shape, num_layers=1)
        number = cache.create()
        for length in power_of_two_edges(affordable_tokens(subject, 520, len(STATES)), (64, 128, 512)):
            cache.append(number, length - cache.live[number].length)
            cache.look(number)
        for _ in range(20):
            cache.append(number, 1)
        cache.look(number)


@check("LAW-18", "recurrent")
def append_batch_to_hundreds_of_sequences_keeps_every_state(subject: Subject) -> None:
    subject.require_size(sequences=2)
    blocks = subject.size("num_blocks", 300)
    cache = production_cache(subject, blocks)
    numbers = [cache.create() for _ in range(min(cache.config["num_blocks"], subject.size("sequences", 300)))]
    for turn in range(3):
        numbers.reverse()
        cache.append_batch(numbers, [min(cache.most, (number + turn) % 4) for number in numbers])
        if turn == 0:
            for number in numbers[::3]:
                cache.drop(number)
            kept = [number for number in numbers if number in cache.live]
            numbers = kept + [cache.create() for _ in range(len(numbers) - len(kept))]
    cache.counted()
    for number in numbers:
        cache.look(number)


@check("LAW-18", "recurrent")
def create_and_drop_of_hundreds_of_sequences_start_from_the_zero_state(subject: Subject) -> None:
    cache = production_cache(subject, 3)
    alive = min(cache.config["num_blocks"], subject.size("sequences", 3))
    for turn in range(300):
        while len(cache.live) >= alive:
            cache.drop(min(cache.live))
        number = cache.create()
        cache.look(number)
        cache.append(number, affordable_tokens(subject, 1 + turn % 5, 300))
        cache.look(number, layers=[turn % len(cache.layers)])


@check("LAW-18", "recurrent")
def truncate_of_hundreds_of_drafts_leaves_no_trace(subject: Subject) -> None:
    cache = production_cache(subject, 1, max_drafts=4, delta_rule=1, num_layers=1)
    number, drafts = cache.create(), min(cache.config["max_drafts"], cache.most)
    if drafts < 1:
        raise NotOffered(f"max_drafts 1, where its limits say {subject.limits.limit('recurrent', 'max_drafts')}")
    one = cache.live[number]
    for turn in range(affordable_tokens(subject, 300)):
        length = one.length
        cache.append(number, drafts)
        cache.truncate(number, length + turn % drafts)
        if turn % 60 in (0, 59):
            cache.look(number)
    cache.look(number)


@check("LAW-18", "recurrent")
def begin_finds_each_of_hundreds_of_checkpoints(subject: Subject) -> None:
    cache = production_cache(subject, 260, num_layers=1, interval=3)
    most = affordable_tokens(subject, cache.interval * (cache.config["num_blocks"] - 2))
    number, interval = cache.create(), cache.interval
    one, stops = cache.live[number], range(interval, most + 1, interval)
    for stop in stops:
        cache.append(number, stop - one.length)
        cache.checkpoint(number)
    tokens = cache.token_ids(one.content, one.length)
    cache.commit(number)
    one.shared = one.length
    cache.counted()
    for alive in (True, False):
        for stop in stops:
            assert_equal(int(cache.cache.match([*tokens[:stop], LAST])), stop, f"hit of a prompt of {stop} tokens and one more")
        for stop in stops[:: max(1, len(stops) // 5)]:
            begun = cache.num_created
            cache.begin(begun, stop + 1, one.content, stop)
            assert_equal(cache.live[begun].length, stop, f"hit of a prompt of {stop} tokens and one more")
            cache.look(begun)
            cache.drop(begun)
        if alive:
            cache.drop(number)
