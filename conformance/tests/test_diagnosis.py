"""The diagnosis: it names every fault planted in the minimal engine, and nothing if the cause is not determined."""

import time
from dataclasses import replace

import numpy as np
import pytest
from bugs.diagnosis import FAULTS, OFFSETS, RECALLS, Scene, prompt_of

from kvref.canary import BLANK, FIRST_WORD, Canary, Oracle
from kvref_canary.diagnosis.case import RequestHistory
from kvref_canary.diagnosis.diagnose import diagnose
from kvref_canary.diagnosis.report import Diagnosis

FLOAT32 = 2.0**-24


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_named(fault):
    scene = Scene(fault.canary)
    fault.plant(scene)
    request, others = scene.said(110)
    found = diagnose(fault.canary, request, [], others, FLOAT32)
    causes = found.candidates or (found,)
    facts = [(cause.kind, {fact: getattr(cause, fact) for fact in fault.facts}) for cause in causes]
    assert (fault.kind, fault.facts) in facts, str(found)
    assert len(causes) == fault.among, str(found)


@pytest.mark.parametrize("canary", [OFFSETS, RECALLS], ids=["offsets", "recalls"])
def test_a_right_engine_gives_no_finding(canary):
    scene = Scene(canary)
    request, others = scene.said(110)
    assert diagnose(canary, request, [], others) is None


def test_what_came_may_stand_apart_from_what_was_told():
    scene = Scene(OFFSETS)
    scene.table(scene.b)[5] = scene.table(scene.c)[5]
    request, others = scene.said(110)
    before = RequestHistory("request b", request.tokens[:115], range(100, 115))
    found = diagnose(OFFSETS, before, request.tokens[115:], others, FLOAT32)
    assert str(found) == (
        "request b read positions 80 to 95 (a block of 16) of request c instead of its own positions 80 to 95 (a block of 16), "
        "in every layer"
    )


@pytest.mark.parametrize("step", [9.0, 11.0])
@pytest.mark.parametrize("canary", [OFFSETS, RECALLS], ids=["offsets", "recalls"])
def test_keys_stored_too_coarsely_are_no_fault_of_anyone(step, canary):
    """With steps larger than a key's length, far coarser than any format in use, which changes no token at these sizes."""
    scene = Scene(canary, step)
    request, others = scene.said(110)
    found = diagnose(canary, request, [], others, FLOAT32)
    assert found.kind == "unknown"
    assert canary.recalls or "keys may be too coarse" in str(found)


def test_where_layers_lie_a_block_apart_both_are_said():
    """What layer 1 reads at [80, 96) is what layer 0 read at [64, 80), if it looks 16 back."""
    canary = Canary(offsets=(16, 31))
    scene = Scene(canary)
    scene.table(scene.b)[5, 1] = scene.table(scene.c)[5, 1]
    request, others = scene.said(110)
    found = diagnose(canary, request, [], others, FLOAT32)
    assert found.kind == "several"
    assert {(each.kind, each.other, each.layers, each.start) for each in found.candidates} == {
        ("another", "request c", (0,), 64),
        ("another", "request c", (1,), 80),
    }
    assert str(found).startswith("either request b read positions ")


def _noisy(canary, seed, noise):
    """A request to a correct engine, with some tokens replaced."""
    rng = np.random.default_rng(seed + 100)  # not the seed of the prompt
    tokens, oracle, said = prompt_of(canary, 99, seed), Oracle(canary, FLOAT32), []
    right = oracle.extend(tokens)[-1]
    asked = tokens[20:90:2]
    for number in range(len(asked) if canary.recalls else 90):
        if canary.recalls:
            tokens.append(asked[number])
            right = oracle.extend([asked[number]])[-1]
        said.append(len(tokens))
        tokens.append(noise(rng, number, FIRST_WORD if right is None else right, tokens))
        right = oracle.extend(tokens[-1:])[-1]
    return RequestHistory("request b", tokens, said, events=((64, "a fork at 64"),))


def _word(rng, canary):
    return int(rng.integers(FIRST_WORD, FIRST_WORD + canary.words))


NOISE = {
    "now and then": lambda canary: lambda rng, number, right, tokens: _word(rng, canary) if rng.random() < 0.2 else right,
    "twice": lambda canary: lambda rng, number, right, tokens: _word(rng, canary) if number in (7, 8) else right,
    "a run": lambda canary: lambda rng, number, right, tokens: _word(rng, canary) if 10 < number < 26 else right,
    "neighbours": lambda canary: (
        lambda rng, number, right, tokens: (
            tokens[len(tokens) - max(canary.period, 40) + int(rng.integers(-2, 3))] if rng.random() < 0.3 else right
        )
    ),
    "blanks among them": lambda canary: (
        lambda rng, number, right, tokens: right if rng.random() < 0.7 else BLANK if rng.random() < 0.5 else _word(rng, canary)
    ),
}


@pytest.mark.parametrize("canary", [OFFSETS, RECALLS], ids=["offsets", "recalls"])
@pytest.mark.parametrize("name", NOISE)
def test_noise_gets_no_name(name, canary):
    others = [RequestHistory(name, prompt_of(canary, 150, 1000 + seed), ended=seed % 2 == 0) for seed, name in enumerate("acdef")]
    found = diagnose(canary, _noisy(canary, 11, NOISE[name](canary)), [], others, FLOAT32)
    assert found.kind == "unknown"
    assert " tokens " in str(found) and " are wrong" in str(found)
    single = "are followed by a right token: either the logits did not decide" in str(found)
    assert single == (name == "now and then") or name in ("blanks among them", "neighbours")


def _inverted(canary, token):
    return token if token < FIRST_WORD else 2 * FIRST_WORD + canary.words - 1 - token


# Each is a sampler: number of the token, the likeliest token -> the token that it chooses.
SAMPLERS = {
    "one special token": ("impossible", 1, 1, lambda canary: lambda number, right: 0 if number == 7 else right),
    "ids after the words": (
        "impossible", 6, 6, lambda canary: lambda number, right: (
            FIRST_WORD + canary.words + 1 if number in range(7, 13) else right
        ),
    ),
    "any token now and then": (
        "impossible", 5, 17, lambda canary: lambda number, right: (
            right if number % 2 or number > 33 else FIRST_WORD + (right + 100) % 256 if number % 8 else number % 3
        ),
    ),
    "logits of the other sign": (
        "inverted", 3, 3, lambda canary: lambda number, right: _inverted(canary, right) if number in (7, 8, 20) else right,
    ),
    "the first token to the end": ("nan", 10, 10, lambda canary: lambda number, right: 0 if number >= 20 else right),
}  # fmt: skip


@pytest.mark.parametrize("canary", [OFFSETS, RECALLS], ids=["offsets", "recalls"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_sampler_that_does_not_choose_the_likeliest_token_is_named(name, canary):
    kind, count, total, sampler = SAMPLERS[name]
    choose = sampler(canary)
    request = _noisy(canary, 11, lambda rng, number, right, tokens: choose(number, right))
    if kind == "nan":
        request = replace(request, tokens=request.tokens[: request.said[29] + 1], said=request.said[:30])
    others = [RequestHistory(name, prompt_of(canary, 150, 1000 + seed)) for seed, name in enumerate("acd")]
    found = diagnose(canary, request, [], others, FLOAT32)
    assert (found.kind, found.shift, found.due if kind != "nan" else total) == (kind, count, total), str(found)


@pytest.mark.parametrize("windows", [(), (16, 40)], ids=["no window", "windows"])
def test_a_nan_in_the_cache_is_not_taken_for_the_choice_of_a_sampler(windows):
    """The entry stays visible to later queries, or leaves their windows: then right tokens follow."""
    canary = Canary(offsets=(16, 31), windows=windows)
    scene = Scene(canary)
    scene.engine.generate(scene.b, 10)
    scene.spoil([0], [0], 105, 106, lambda layer, keys, values: (keys, np.full_like(values, np.nan)))
    request, others = scene.said(110)
    assert 0 in request.tokens[109:]
    found = diagnose(canary, request, [], others, FLOAT32)
    assert found.kind == ("unknown" if windows else "nan"), str(found)


def test_it_takes_seconds_among_twenty_others_in_a_long_context():
    others = [RequestHistory(str(seed), prompt_of(OFFSETS, 900, seed)) for seed in range(20)]
    tokens = prompt_of(OFFSETS, 879, 50)
    spoilt, other = Oracle(OFFSETS, FLOAT32), Oracle(OFFSETS, FLOAT32)
    right = spoilt.extend(tokens)[-1]
    other.extend(others[7].tokens)
    for layer in range(2):
        for head in range(2):
            spoilt.entries[layer][head][848:864] = other.entries[layer][head][848:864]
    began = time.process_time()
    found = diagnose(OFFSETS, RequestHistory("request b", tokens), [right, *spoilt.generate(right, 99)], others, FLOAT32)
    assert time.process_time() - began < 5  # usually one second
    assert (found.kind, found.other, found.start, found.stop, found.block) == ("another", "7", 848, 864, 16)


@pytest.mark.parametrize("canary", [OFFSETS, RECALLS], ids=["offsets", "recalls"])
def test_the_oracle_says_the_same_of_many_tokens_as_of_each(canary):
    rng = np.random.default_rng(4)
    oracle = Oracle(canary, FLOAT32)
    oracle.extend(prompt_of(canary, 70, 4))
    for layer, head, position in rng.integers([canary.num_layers, canary.num_kv_heads, 71], size=(12, 3)):
        spoilt = {"at": None} if position % 2 else {"digit": int(rng.integers(-1, 16))}
        oracle.entries[layer][head][position] = replace(oracle.entries[layer][head][position], **spoilt)
    tokens = [int(token) for token in rng.choice(prompt_of(canary, 70, 4), 60)]
    one_by_one = oracle.upto(71)
    assert oracle.extend([]) == []
    assert oracle.extend(tokens) == [said for token in tokens for said in one_by_one.extend([token])]
    assert oracle.entries == one_by_one.entries


SENTENCES = {
    "request b: cause unknown. A clue.": Diagnosis("unknown", "request b", clue="A clue."),
    "request b read zeros at position 5, in layer 1, in kv head 0, values only": Diagnosis(
        "zeros", "request b", (1,), heads=(0,), start=5, stop=6, part="values"
    ),
    "keys of positions 32 to 63 (a block of 32) of request b were rotated 2 positions too little, in layer 0 at least": Diagnosis(
        "turned", "request b", (0,), True, start=32, stop=64, shift=-2
    ),
    "request b lost positions 16 to 47 (blocks of 16), and all later tokens moved to earlier positions": Diagnosis(
        "dropped", "request b", start=16, stop=48
    ),
    "request b attended to a window of 31 tokens instead of 32, in layer 1": Diagnosis(
        "window", "request b", (1,), shift=31, due=32
    ),
    "request b generated only the first token of the vocabulary, 9 times, from position 40 on: the logits were NaN, because of "
    "the cache or of a later operation": Diagnosis("nan", "request b", start=40, stop=41, shift=9),
    "2 of 5 wrong tokens of request b have the lowest logit of all tokens if the right entries were read: the sign of the logits "
    "was inverted after attention": Diagnosis("inverted", "request b", shift=2, due=5),
    "request b read the entries of kv head 1 at positions 40 to 50, perhaps later ones, in every layer, after a fork": Diagnosis(
        "head", "request b", start=40, stop=51, shift=1, open=True, after="a fork"
    ),
}


@pytest.mark.parametrize(("sentence", "finding"), SENTENCES.items())
def test_the_sentence_says_the_facts(sentence, finding):
    assert str(finding) == sentence
