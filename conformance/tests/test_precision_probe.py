"""The precision probe: the share of right tokens of a canary."""

from kvref.canary import BLANK, Canary
from kvref.engine import Engine
from kvref_canary.diagnosis.precision_probe import measure_precision

CANARY = Canary(offsets=(5, 9))


def complete(prompt, count):
    engine = Engine(CANARY)
    session = engine.open()
    engine.extend(session, prompt)
    return engine.generate(session, count)


def test_a_right_cache_says_every_token_right():
    assert measure_precision(CANARY, complete, prompts=3) == (3 * 15, 3 * 15)


def test_each_wrong_token_counts_once():
    def third_is_blank(prompt, count):
        said = complete(prompt, count)
        return [*said[:2], BLANK, *said[3:]]

    assert measure_precision(CANARY, third_is_blank, prompts=3) == (3 * 14, 3 * 15)


def test_prompts_are_drawn_from_the_seed():
    told = []
    for seed in (0, 0, 1):
        measure_precision(CANARY, lambda prompt, count: told.append(prompt) or complete(prompt, count), seed=seed)
    assert told[0] == told[1] != told[2]
