"""Every explanation that fits: the supposed damage, the tokens it predicts, and the cost of describing it, in bits."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvref_canary.diagnosis.candidates import ShiftedMatch, named
from kvref_canary.diagnosis.case import Case, Said
from kvref_canary.diagnosis.corruptions import (
    PARTS,
    Change,
    elsewhere,
    heads_turned,
    other_head,
    other_layer,
    swapped,
    turned,
    zeros,
)
from kvref_canary.diagnosis.extent import SIZES, CorruptionExtent, extents_of, fitted
from kvref_canary.diagnosis.report import Diagnosis

VAGUE = 4.0  # bits subtracted for each token that an explanation does not predict
KIND = 3.0  # bits to describe a kind
PLACE = 2.0  # bits for start and stop: the wrong tokens determine them almost exactly
ODD = 4.0  # bits for each edge that is neither a block border nor an event
RIGHT = 6  # right tokens after the first wrong one; one of them shows where tokens were moved
BLANKS = ("zeros", "unreadable")  # kinds for which blanks are sufficient evidence
SHIFTED = ("own", "another", "earlier occupant")  # kinds whose keys may be rotated to another position


@dataclass(frozen=True)
class Hypothesis:
    """worth: bits of wrong digits predicted, minus the bits to describe the explanation, minus VAGUE per unpredicted token.

    named: bits of wrong digits predicted, minus the bits to describe which request they belong to.
    """

    finding: Diagnosis
    worth: float
    named: float


def explanations(case: Case, found: list[ShiftedMatch]) -> Iterator[Hypothesis]:
    """Return the explanations that contradict no token of the engine."""
    yield from _windows(case)
    yield from _retold(case, found)
    moments = [moment for moment in _moments(case) if moment <= case.begin]
    for change, finding, name in _changes(case, found):
        for layers in _layer_sets(case):
            if finding.kind == "layer" and any(map(case.canary.looks_up, (*layers, finding.shift))):
                continue
            whole = finding.kind in ("unreadable", "turned") or (finding.kind in SHIFTED and finding.shift != 0)
            places = extents_of(case, layers, whole and finding.part != "values")
            if finding.stop:
                places = [(start, finding.stop) for start, _ in places]
            fit = fitted(case, change, layers, places, moments)
            if finding.kind == "swapped" and fit and not fit.damage.start < finding.stop - finding.shift < fit.damage.stop:
                continue  # only one of the two blocks was read
            if fit is not None:
                cost = KIND + PLACE + ODD * _odd(case, fit) + math.log2(1 + case.canary.num_layers)
                yield _explained(case, fit.said, cost, _placed(case, finding, fit), name)


def _explained(case: Case, said: Said, cost: float, finding: Diagnosis, name: float = 0.0) -> Hypothesis:
    """name: the part of the cost that only digits can outweigh: a blank does not identify a request."""
    evidence = case.evidence(said, blanks=not finding.open)
    named = math.inf if finding.kind in BLANKS else case.evidence(said) - name
    return Hypothesis(finding, evidence - name - cost - VAGUE * case.vague(said), named)


def _layer_sets(case: Case) -> list[tuple[int, ...]]:
    """Return all layers together, and each alone. If the last layer recalls, damage in all layers shows in the last one."""
    layers = range(case.canary.num_layers)
    single: list[tuple[int, ...]] = [(layer,) for layer in layers]
    return single if case.canary.recalls or len(layers) == 1 else [tuple(layers), *single]


def _moments(case: Case) -> list[int]:
    """Return the likeliest moments of damage: the first wrong query, the first generated token, and each event.

    A canary that recalls looks back one token in all layers except the last. Its answers hardly show when those were damaged.
    """
    spoke = [] if case.canary.recalls else [min(case.request.said, default=len(case.request.tokens))]
    return list(dict.fromkeys([case.begin, *spoke, *(position for position, _ in case.request.events)]))


def _odd(case: Case, fit: CorruptionExtent) -> int:
    """Return the number of odd edges, plus one if the damage happened at no likely moment."""
    start, stop = fit.block or (fit.damage.start, fit.damage.stop)
    odd = _odd_edges(case, (start,) if fit.open else (start, stop))
    return odd + (fit.damage.since not in (*_moments(case), fit.damage.start))


def _odd_edges(case: Case, edges: Sequence[int]) -> int:
    """Return the number of edges that are neither at a block border nor at an event."""
    likely = [position for position, _ in case.request.events]
    return sum(edge % SIZES[0] != 0 and edge not in likely for edge in edges)


def _placed(case: Case, finding: Diagnosis, fit: CorruptionExtent) -> Diagnosis:
    """Add the place of the damage to a finding, and the event that caused it."""
    canary, damage = case.canary, fit.damage
    edges = {damage.start, damage.stop, damage.since, *(fit.block or ())}
    after = [what for position, what in case.request.events if position in edges]
    return replace(
        finding,
        layers=damage.layers if len(damage.layers) < canary.num_layers else (),
        hidden=canary.looks_up(damage.layers[-1]),
        heads=damage.heads if len(damage.heads) < canary.num_kv_heads else (),
        start=damage.start,
        stop=damage.stop,
        open=fit.open,
        within=fit.block,
        after=after[-1] if after else None,
    )


def _changes(case: Case, found: list[ShiftedMatch]) -> Iterator[tuple[Change, Diagnosis, float]]:
    """Return each change with its finding and the bits to describe it."""
    canary, name = case.canary, case.request.name
    yield zeros("values"), Diagnosis("zeros", name, part="values"), 0.0
    yield zeros("keys"), Diagnosis("unreadable", name, part="keys"), 0.0
    for layer in range(canary.num_layers):
        yield other_layer(case.clean, layer), Diagnosis("layer", name, shift=layer), 0.0
    for head in range(canary.num_kv_heads):
        yield other_head(head), Diagnosis("head", name, shift=head), 0.0
    for by in range(1, canary.num_kv_heads if len(case.wrong_heads) > 1 else 1):
        yield heads_turned(by), Diagnosis("heads", name, shift=by), 0.0
    for by in dict.fromkeys(-run.shift for run in found if run.source is case.request):
        yield turned(by), Diagnosis("turned", name, shift=by, part="keys"), named(case, case.request, by)
    for run in found:
        own = run.source is case.request
        oracle = None if own else case.oracle_of(run.source)
        kind = "own" if own else "earlier occupant" if run.source.ended else "another"
        for number, part in enumerate(PARTS if run.shift or canary.recalls else PARTS[:1]):
            finding = Diagnosis(kind, name, part=part, other=None if own else run.source.name, shift=run.shift)
            yield elsewhere(oracle, run.shift, part), finding, run.cost(case) + number
        if own and run.shift % SIZES[0] == 0:
            by, place = abs(run.shift), int(case.places[case.wrong[0], -1])
            first = place // by - (run.shift < 0)
            for number, part in enumerate(PARTS[:2]):
                finding = Diagnosis("swapped", name, part=part, shift=by, stop=(first + 2) * by)
                yield swapped(by, first, part), finding, run.cost(case) + number


def _windows(case: Case) -> Iterator[Hypothesis]:
    """Try windows that are off by one or two tokens, in each layer and in all. A still wider window gives the same tokens."""
    windows = case.canary.windows
    for by in (-2, -1, 1):
        for layers in _layer_sets(case):
            if all(windows[layer] is None for layer in layers):
                continue
            seen = tuple(
                window + by if layer in layers and window is not None else window for layer, window in enumerate(windows)
            )
            said = case.replay(0, None, seen)
            if not case.conflicts(said):
                one = next(layer for layer in layers if windows[layer] is not None)
                some = layers if len(layers) < case.canary.num_layers else ()
                finding = Diagnosis("window", case.request.name, some, shift=seen[one] or 0, due=windows[one] or 0)
                yield _explained(case, said, KIND, finding)


def _retold(case: Case, found: list[ShiftedMatch]) -> Iterator[Hypothesis]:
    """Try tokens that the engine dropped, received twice or did not forget: every later entry has moved."""
    for run in found:
        for finding, tokens in _moved(case, run):
            said = case.retold(tokens)
            if not case.conflicts(said):
                edges = (finding.start,) if finding.kind == "left over" else (finding.start, finding.stop)
                odd = _odd_edges(case, edges)
                yield _explained(case, said, KIND + PLACE + ODD * odd, finding, run.cost(case))


def _moved(case: Case, run: ShiftedMatch) -> Iterator[tuple[Diagnosis, list[int]]]:
    """Return edits that move tokens by the shift of a run, each with the resulting tokens of the engine."""
    told, name, by = case.tokens[: case.begin + 1], case.request.name, abs(run.shift)
    right = [number for number in range(case.wrong[0], len(case.got)) if number not in case.wrong][:RIGHT]
    first = [place for place in case.sources[right].tolist() if by <= place < len(told)]  # these may not have moved
    if run.source is case.request:
        for place in first:
            if run.shift < 0:
                yield Diagnosis("dropped", name, start=place - by, stop=place), told[: place - by] + told[place:]
            else:
                yield Diagnosis("twice", name, start=place, stop=place + by), told[: place + by] + told[place:]
    elif run.shift > 0:
        other = list(run.source.tokens)
        start = next((at for at, pair in enumerate(zip(told, other, strict=False)) if pair[0] != pair[1]), len(told))
        stale = other[start : start + by]
        finding = Diagnosis("left over", name, start=start, stop=start + by, other=run.source.name)
        yield finding, told[:start] + stale + told[start:]
