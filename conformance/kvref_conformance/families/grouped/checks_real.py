"""Checks of LAW-18: windows of hundreds of tokens and blocks of 16, in sequences of thousands of tokens."""

from typing import Any

from kvref_conformance.checking.content import pair_of_content
from kvref_conformance.checking.expect import equal, pair, true
from kvref_conformance.checking.real import affordable
from kvref_conformance.checking.registry import check
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.grouped.grown import Grown
from kvref_conformance.families.prefix.served import prompt, streams
from kvref_conformance.outcome import NotOffered

LONG = 4200  # tokens; not a multiple of the block size
PREFILL = 700  # tokens of a step
CALLS = 400  # steps of one token


def served(subject: Subject, tokens: int, **sizes: Any) -> Grown:
    wanted = {"block_size": 16, "num_layers": 2, "num_kv_heads": 1, "head_dim": 64, "window": 512} | sizes
    return Grown(subject, tokens, **wanted)


def held_at_its_edges(grown: Grown, sequence: int, what: str) -> None:
    """Reads, in every layer, the first and last stored positions and positions at block boundaries."""
    one = grown.sequences[sequence]
    for layer in grown.layers:
        first = one.gone[layer % grown.groups] * grown.size
        ends = {first, first + 1, first + grown.size, (first + one.length) // 2, one.length - grown.size, one.length - 1}
        positions = sorted(position for position in ends if first <= position < one.length)
        want = pair_of_content(streams(one.tokens, one.salt)[positions], layer, positions, *grown.row)
        pair(grown.cache.read(sequence, layer, positions), want, f"{what}, layer {layer}, positions {positions}")


def passing(subject: Subject, grown: Grown, length: int) -> None:
    """Appends a prompt in long steps, then token by token. Counts blocks after each step, and reads rows where blocks end."""
    sequence, decoded = grown.create(prompt(length)), min(CALLS, length // 4)
    while grown.sequences[sequence].length < length - decoded:
        grown.step(sequence, min(PREFILL, length - decoded - grown.sequences[sequence].length))
        grown.counted(f"after a long step to length {grown.sequences[sequence].length}")
    grown.look(sequence, "a long prompt")
    grown.refuses(sequence)
    while grown.sequences[sequence].length < length:
        grown.step(sequence, 1)
        when = f"after a step of one token to length {grown.sequences[sequence].length}"
        grown.counted(when)
        if grown.sequences[sequence].length % grown.size in (0, 1, grown.size - 1):
            held_at_its_edges(grown, sequence, f"a sequence {when}")
    grown.holds(sequence, f"after steps of {length} tokens in total")
    grown.look(sequence, f"a sequence of {length} tokens")
    grown.refuses(sequence)
    grown.attends(sequence, 1, f"a sequence of {length} tokens")
    grown.drop(sequence)
    grown.counted("after drop of all sequences")


@check("LAW-18", "grouped")
def a_window_of_hundreds_passes_over_thousands(subject: Subject) -> None:
    length = affordable(subject, LONG)
    passing(subject, served(subject, length), length)


@check("LAW-18", "grouped")
def a_long_prompt_answers_the_same_each_time(subject: Subject) -> None:
    """The prompt is computed once, and then found three times. Other prompts fill the pool in between."""
    length = affordable(subject, LONG // 2, 4)
    grown = served(subject, length + length // 4)
    tokens = prompt(length)
    whole = tokens[: length // grown.size * grown.size]
    for time in range(4):
        sequence = grown.begin([*tokens, 70 + time])
        grown.look(sequence, f"the hit of call {time + 1} of begin with a long prompt")
        grown.up_to(sequence, length + 1, by=PREFILL // 2, commit=True)
        grown.look(sequence, f"a long prompt after call {time + 1} of begin with it")
        grown.attends(sequence, 1, f"a long prompt after call {time + 1} of begin with it")
        grown.drop(sequence)
        hit = grown.match(whole)
        true(hit < len(whole), f"match of a prompt of full blocks only, in round {time + 1}", f"less than {len(whole)}", hit)
        grown.drop(grown.serve(prompt(length // 8, 10 + time), by=PREFILL))
    equal(grown.cache.num_free_blocks, grown.total, "free blocks after drop of all sequences")


@check("LAW-18", "grouped")
def a_pool_of_thousands_of_blocks_is_found_and_held(subject: Subject) -> None:
    """Blocks with any id store their rows: many sequences are appended in turn, then all of them are read."""
    grown = served(subject, 16 * 1100, num_kv_heads=1, head_dim=8)
    each = grown.window + 3 * grown.size
    count = min(
        grown.total // (grown.groups * -(-each // grown.size)), subject.size("sequences", 24), affordable(subject, 30, each)
    )
    if count < 1:
        raise NotOffered(f"room for a sequence of {each} tokens")
    sequences = [grown.create(prompt(each, which + 1)) for which in range(count)]
    for sequence in sequences:
        grown.up_to(sequence, each, by=PREFILL)
    for sequence in sequences:
        grown.look(sequence, f"sequence {sequence} of {count} in a pool of {grown.total} blocks")
        grown.up_to(sequence, each, by=1)
    grown.counted(f"with {count} sequences of {each} tokens")
    for sequence in sequences:
        grown.drop(sequence)
    grown.counted("after drop of all sequences")


@check("LAW-18", "grouped", real=True)
def layers_as_a_model_has_them_go_over_thousands(subject: Subject) -> None:
    """Six groups and a window of 1024, as in a model in which every sixth layer sees every token."""
    length = affordable(subject, LONG)
    passing(subject, served(subject, length, num_layers=6, num_groups=6, window=1024, num_kv_heads=2), length)
