"""Diagnosis of a wrong token: what the engine read instead of its own cache entries.

Each supposed damage is a change to the oracle's entries. It fits if the changed oracle generates every token of the engine. The
first wrong token shows, layer by layer, which position was read. A search for the wrong digits finds the sequence that contains
them. An explanation's worth is the bits of wrong digits that it predicts, minus the bits that select it among all explanations.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kvref.canary import BLANK, Canary
from kvref_canary.diagnosis.candidates import MIN_BITS, ShiftedMatch, shifted_matches
from kvref_canary.diagnosis.case import Case, RequestHistory
from kvref_canary.diagnosis.hypotheses import rank_hypotheses
from kvref_canary.diagnosis.report import Diagnosis
from kvref_canary.diagnosis.token_choice import find_wrong_choice
from kvref_canary.diagnosis.wide_search import wide_hypotheses

EQUAL_BITS = 3.0  # bits between explanations that fit equally
NEAR_POSITIONS = 3  # positions
MIN_ISOLATED = 3  # wrong tokens


def diagnose(
    canary: Canary, request: RequestHistory, got: Sequence[int], others: Sequence[RequestHistory] = (), roundoff: float = 2.0**-8
) -> Diagnosis | None:
    """Return what was read instead, or None if no token is wrong.

    request.tokens: all tokens up to the first wrong one, or more. got: the tokens that the engine generated after them, each fed
    back to it; two periods are the most informative. A canary that recalls needs further input between answers to read more than
    one position: that input is part of request.tokens, and request.said lists the generated ones. others: the other requests of
    the engine, earlier or concurrent. roundoff: unit roundoff of the dtype that the engine computes with.
    """
    case = Case(canary, request, got, others, roundoff)
    if not case.wrong:
        return None
    found = shifted_matches(case)
    fits = [each for each in rank_hypotheses(case, found) if each.score >= MIN_BITS]
    fits = fits or [each for each in wide_hypotheses(case) if each.score >= MIN_BITS]
    best = max((each.score for each in fits), default=0.0)
    fits = sorted((each for each in fits if each.score > best - EQUAL_BITS), key=lambda each: -each.score)
    if not fits or any(each.naming_cost < MIN_BITS for each in fits):
        unknown = Diagnosis("unknown", request.name, heads=case.wrong_heads, clue=_describe_clue(case, found))
        return find_wrong_choice(case) or unknown
    return _combine_findings(request, [each.finding for each in fits])


def _combine_findings(request: RequestHistory, findings: list[Diagnosis]) -> Diagnosis:
    """Combine all findings that fit equally. One that fits in one layer and in all layers is reported for the one layer."""
    causes: dict[tuple[object, ...], Diagnosis] = {}
    for finding in sorted(findings, key=lambda finding: not finding.layers):
        cause = (finding.kind, finding.other, finding.shift, finding.start, finding.part)
        before = causes.setdefault(cause, finding)
        if before.layers and not finding.layers:
            causes[cause] = replace(before, hidden=True)
    candidates = tuple(causes.values())
    return candidates[0] if len(candidates) == 1 else Diagnosis("several", request.name, candidates=candidates)


def _describe_clue(case: Case, found: list[ShiftedMatch]) -> str:
    """Describe what is certain about wrong tokens without an explanation."""
    heads = ", ".join(map(str, case.wrong_heads))
    blanks = sum(case.answers[number] == BLANK for number in case.wrong)
    are = "is" if len(case.wrong) == 1 else "are"
    text = f"{len(case.wrong)} of {len(case.answers)} tokens {are} wrong, in the digits of kv head {heads}."
    if blanks:
        text += (
            f" {blanks} {'is a blank' if blanks == 1 else 'are blanks'}: a head read zeros, or could not distinguish positions."
        )
    read = case.sources[[number for number in case.wrong if case.sources[number] >= 0]]
    if len(read):
        text += f" The tokens to be read are at positions {read.min()} to {read.max()}."
    if found and found[0].bits >= found[0].selection_cost(case) + 2 * MIN_BITS:
        first = int(case.sources[case.wrong[0]]) + found[0].shift
        text += f" The first {found[0].count} equal the tokens of {found[0].source.name} from position {first} on."
    return text + (_describe_nearby_digits(case) or _describe_isolation(case))


def _describe_nearby_digits(case: Case) -> str:
    """Describe wrong digits that belong to varying positions near the right ones: a sign of keys stored too coarsely."""
    wrong = [number for number in case.wrong if case.sources[number] >= NEAR_POSITIONS and case.wrong_digits[number].any()]
    tokens = np.array(case.tokens)
    near = 0
    for number in wrong:
        heads = case.wrong_digits[number]
        place = int(case.sources[number])
        close = [case.canary.digits(int(token)) for token in tokens[place - NEAR_POSITIONS : place + NEAR_POSITIONS + 1]]
        near += any((np.array(each)[heads] == case.digits[number][heads]).all() for each in close)
    chance = 2 * NEAR_POSITIONS * 2.0**-case.canary.bits
    if len(wrong) < 4 or near < len(wrong) * (1 + chance) / 2:
        return ""
    return (
        f" {near} of them have the digits of a position at most {NEAR_POSITIONS} away: keys may be too coarse or wrongly rotated."
    )


def _describe_isolation(case: Case) -> str:
    """Describe single wrong tokens between right ones: a sampler selects such tokens. A wrong read of a block does not."""
    wrong = set(case.wrong)
    before_right = sum(number + 1 < len(case.answers) and number + 1 not in wrong for number in case.wrong)
    if len(wrong) < MIN_ISOLATED or 2 * before_right < len(wrong):
        return ""
    return (
        f" {before_right} of them are followed by a right token: either the logits did not decide (a sampler, a penalty, logits "
        "that were changed after attention), or single entries were overwritten."
    )
