"""What an engine that said a wrong token read instead of its own cache entries.

Each supposed damage is a change to the oracle's entries, after which it must say all that the engine said. The first wrong token
tells, layer by layer, which position was read; a search for the wrong digits tells in which sequence they lie. What fits is
weighed against what it takes to say it: bits of wrong digits foretold, less the bits that choose one explanation among all.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvref.canary import BLANK, Canary
from kvref_conformance.engines.explaining import explanations
from kvref_conformance.engines.finding import Finding
from kvref_conformance.engines.proposing import ENOUGH, Run, runs
from kvref_conformance.engines.told import Case, Told

EQUAL = 3.0  # bits between explanations that fit equally
NEAR = 3  # positions


def diagnose(
    canary: Canary, request: Told, got: Sequence[int], others: Sequence[Told] = (), roundoff: float = 2.0**-8
) -> Finding | None:
    """What was read instead, or None where nothing is wrong.

    request.tokens: all up to the first wrong one, or more. got: what the engine said behind them, fed what it said; two periods
    of it tell most. What is told in between, as a canary that recalls must be to be asked about more than one place, stands in
    request.tokens, and request.said then tells the two apart. others: what else the engine was told, before and besides.
    roundoff: of the dtype that the engine computes with.
    """
    case = Case(canary, request, got, others, roundoff)
    if not case.wrong:
        return None
    found = runs(case)
    fits = [each for each in explanations(case, found) if each.worth >= ENOUGH]
    best = max((each.worth for each in fits), default=0.0)
    fits = sorted((each for each in fits if each.worth > best - EQUAL), key=lambda each: -each.worth)
    if not fits or any(each.named < ENOUGH for each in fits):
        return Finding("unknown", request.name, heads=case.wrong_heads, clue=_clue(case, found))
    return _joined(request, [each.finding for each in fits])


def _joined(request: Told, findings: list[Finding]) -> Finding:
    """One finding of all that fit equally. What fits in one layer and in every layer shows in the one."""
    causes: dict[tuple[object, ...], Finding] = {}
    for finding in sorted(findings, key=lambda finding: not finding.layers):
        cause = (finding.kind, finding.other, finding.shift, finding.start, finding.part)
        before = causes.setdefault(cause, finding)
        if before.layers and not finding.layers:
            causes[cause] = replace(before, hidden=True)
    candidates = tuple(causes.values())
    return candidates[0] if len(candidates) == 1 else Finding("several", request.name, candidates=candidates)


def _clue(case: Case, found: list[Run]) -> str:
    """What is certain of tokens that nothing explains."""
    heads = ", ".join(map(str, case.wrong_heads))
    blanks = sum(case.got[number] == BLANK for number in case.wrong)
    are = "is" if len(case.wrong) == 1 else "are"
    text = f"Of {len(case.got)} tokens {len(case.wrong)} {are} wrong, by the digits of kv head {heads}."
    if blanks:
        text += (
            f" {blanks} {'is a blank' if blanks == 1 else 'are blanks'}: of zeros, or of places that a head could not tell apart."
        )
    read = case.sources[[number for number in case.wrong if case.sources[number] >= 0]]
    if len(read):
        text += f" What was due lies at positions {read.min()}..{read.max()}."
    if found and found[0].bits >= found[0].cost(case) + 2 * ENOUGH:
        first = int(case.sources[case.wrong[0]]) + found[0].shift
        text += f" The first {found[0].count} are what {found[0].source.name} was told from position {first} on."
    return text + _nearby(case)


def _nearby(case: Case) -> str:
    """Whether the wrong digits are those of places next to the right ones, now this and now that: keys stored too coarsely."""
    wrong = [number for number in case.wrong if case.sources[number] >= NEAR and case.wrong_digits[number].any()]
    tokens = np.array(case.tokens)
    near = 0
    for number in wrong:
        heads = case.wrong_digits[number]
        place = int(case.sources[number])
        close = [case.canary.digits(int(token)) for token in tokens[place - NEAR : place + NEAR + 1]]
        near += any((np.array(each)[heads] == case.digits[number][heads]).all() for each in close)
    chance = 2 * NEAR * 2.0**-case.canary.bits
    if len(wrong) < 4 or near < len(wrong) * (1 + chance) / 2:
        return ""
    return f" {near} of them carry digits of places at most {NEAR} away, as where keys are too coarse or turned elsewhere."
