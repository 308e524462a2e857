"""Checks of LAW-18: prefixes at the sizes of serving."""

from typing import Any

from kvref_conformance.checking.expect import equal, pair, true
from kvref_conformance.checking.real import affordable
from kvref_conformance.checking.registry import check
from kvref_conformance.conversation.subject import Subject
from kvref_conformance.families.paged.counting import room, tables_alone
from kvref_conformance.families.prefix.served import Served, declared_order, prompt
from kvref_conformance.outcome import NotOffered

LONG = 4096  # tokens of a system prompt


def serving(subject: Subject, entries: int, **sizes: Any) -> Served:
    wanted = {"block_size": 16, "num_layers": 1, "num_kv_heads": 1, "head_dim": 64} | sizes
    served = Served(subject, 1, **wanted) if subject.size("num_blocks", entries) < entries else Served(subject, entries, **wanted)
    if room(served.cache) < 8:
        raise NotOffered(f"blocks for 8 entries, where its limits say {subject.limits.of(subject.family, 'num_blocks')}")
    return served


@check("LAW-18", "prefix")
def hundreds_of_sequences_share_a_long_prefix(subject: Subject) -> None:
    subject.need(sequences=2)
    served = serving(subject, LONG // 16 + 300)
    entries = min(LONG // served.size, room(served.cache) // 2)
    tokens = prompt(affordable(subject, entries * served.size) // served.size * served.size)
    if not tokens:
        raise NotOffered("room for a prefix of at least one block")
    first = served.serve(tokens)
    free, layers = served.cache.num_free_blocks, len(served.layers)
    count = min(subject.size("sequences", 250) - 1, free // layers)
    many = []
    for which in range(count):
        sequence, hit = served.begin([*tokens, 2_000_000 + which])
        equal(hit, len(tokens), f"the hit of sequence {which} with a shared prefix")
        served.write(sequence, hit, hit + 1)
        many.append(sequence)
    equal(served.cache.num_free_blocks, free - count * layers, f"free blocks after begin of {count} sequences with the prefix")
    served.cache.drop(first)
    for sequence in many[:: max(1, count // 4)]:
        served.look(sequence, len(tokens) + 1, "a sequence with a shared prefix")
    for sequence in many:
        if tables_alone(subject):
            served.cache.drop(sequence)
            continue
        ends = [0, len(tokens) - 1, len(tokens)]
        want = served.computed(sequence, 0, ends)
        pair(served.cache.read(sequence, 0, ends), want, "the first and last tokens of a sequence with a shared prefix")
        served.cache.drop(sequence)
    equal(served.match([*tokens, 0]), len(tokens), "match of a prefix after drop of all sequences")


@check("LAW-18", "prefix")
def blocks_are_found_and_taken_in_thousands(subject: Subject) -> None:
    declared_order(subject)
    served = serving(subject, 2048, head_dim=8)
    whole, size, layers = room(served.cache), served.size, len(served.layers)
    rows = max(1, affordable(subject, 4 * size) // size)  # blocks per prompt
    tokens = [prompt(rows * size, 10 + which) for which in range(min(whole // rows, affordable(subject, 500)))]
    served.seen(*tokens)
    equal([served.match([*each, 0]) for each in tokens], [rows * size] * len(tokens), "match of prompts that fill the pool")
    spare = whole - rows * len(tokens)
    taker = served.taking(spare + rows * (len(tokens) // 2))
    found = [served.match([*each, 0]) // size for each in tokens]
    half = len(tokens) // 2
    equal(
        found, [0] * half + [rows] * (len(tokens) - half), "numbers of cached blocks of prompts after half of them were evicted"
    )
    for which in range(half, len(tokens), max(1, len(tokens) // 8)):
        served.begins(tokens[which], (rows - 1) * size, f"prompt {which}")
    served.cache.drop(taker)
    free = served.cache.num_free_blocks
    true(free >= whole * layers, "free blocks without live sequences", f"at least {whole * layers}", free)


@check("LAW-18", "prefix", real=True)
def a_prefix_cache_serves_a_thousand_prompts(subject: Subject) -> None:
    """The hits depend on the order of eviction, but must be right in any order."""
    served = serving(subject, 1024, num_layers=2, head_dim=32)
    longest = min(40 * served.size, room(served.cache) * served.size // 4)
    for round in range(affordable(subject, 1000, longest)):
        branch, cut = int(subject.rng.integers(1, 40)), int(subject.rng.integers(1, longest))
        tokens = [*prompt(cut // 2, 1 + branch % 5), *prompt(cut - cut // 2, 10 + branch)]
        sequence, hit = served.begin(tokens)
        if round % 10 == 0:
            served.look(sequence, hit, f"the hit of prompt {round}")
        served.write(sequence, hit, cut)
        served.cache.commit(sequence, tokens)
        if round % 50 == 0:
            served.look(sequence, cut, f"prompt {round}")
        served.cache.drop(sequence)
    equal(served.cache.num_free_blocks, served.cache.config["num_blocks"], "free blocks without live sequences")
