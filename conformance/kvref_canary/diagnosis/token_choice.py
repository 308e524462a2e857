"""Wrong tokens that no cache entry explains: the logits were changed after attention, or not the likeliest token was chosen.

Whatever a canary reads, some tokens are never its likeliest: BLANK always has a logit above 0, and every other token without
digits has the logit 0. Only NaN can select such a token, because most programs take the first NaN for the largest number. But a
NaN in an entry makes the logits of all later queries NaN that see the entry, so a right token afterwards excludes it. The token
that has all bits of the right one inverted has the lowest of all logits: their sign was inverted.
"""

import math
from itertools import takewhile

from kvref.canary import BLANK
from kvref_canary.diagnosis.candidates import MIN_BITS
from kvref_canary.diagnosis.case import Case
from kvref_canary.diagnosis.report import Diagnosis

MIN_NAN = 3  # tokens at the end of an answer that are the first one of the vocabulary
FIRST_TOKEN = 0


def find_wrong_choice(case: Case) -> Diagnosis | None:
    """Return the diagnosis if the wrong tokens prove that they were not read, else None."""
    impossible = [number for number in case.wrong if _is_impossible(case, case.answers[number])]
    passed = [number for number in impossible if number < _last_right(case)]
    runs = len([number for number in passed if number + 1 not in passed])
    if runs > any(window is not None for window in case.canary.windows):  # one NaN may have left a window
        return Diagnosis("impossible", case.request.name, shift=len(passed), due=len(case.wrong))
    inverted = [number for number in case.wrong if _is_inverted(case, number)]
    if len(inverted) * (case.canary.bits * case.canary.num_kv_heads - math.log2(len(case.wrong))) >= MIN_BITS:
        return Diagnosis("inverted", case.request.name, shift=len(inverted), due=len(case.wrong))
    count = len(list(takewhile(lambda token: token == FIRST_TOKEN, reversed(case.answers))))
    if count >= MIN_NAN:
        start = int(case.queries[-count]) + 1
        return Diagnosis("nan", case.request.name, start=start, stop=start + 1, shift=count)
    return None


def _is_impossible(case: Case, token: int) -> bool:
    """Whether the token is never the likeliest. It has the logit 0, and BLANK has a larger one."""
    return token != BLANK and min(case.canary.digits(token)) < 0


def _is_inverted(case: Case, number: int) -> bool:
    right, got = (case.canary.digits(token) for token in (case.expected_answers[number] or BLANK, case.answers[number]))
    return min(right + got) >= 0 and all(one ^ other == 2**case.canary.bits - 1 for one, other in zip(right, got, strict=True))


def _last_right(case: Case) -> int:
    """The last query with a right answer; -1 without one."""
    pairs = enumerate(zip(case.answers, case.expected_answers, strict=True))
    return max((number for number, (got, want) in pairs if got == want), default=-1)
