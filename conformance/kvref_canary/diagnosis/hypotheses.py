"""Every explanation that fits: the supposed damage, the tokens it predicts, and the cost of describing it, in bits."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvref_canary.diagnosis.candidates import ShiftedMatch, naming_cost
from kvref_canary.diagnosis.case import Answers, Case
from kvref_canary.diagnosis.corruptions import (
    PARTS,
    Change,
    entries_of,
    entries_of_head,
    entries_of_layer,
    rotated_heads,
    rotated_keys,
    swapped_blocks,
    zeroed_entries,
)
from kvref_canary.diagnosis.extent import BLOCK_SIZES, CorruptionExtent, candidate_extents, fit_corruption
from kvref_canary.diagnosis.report import Diagnosis

VAGUE_COST = 4.0  # bits subtracted for each token that an explanation does not predict
KIND_COST = 3.0  # bits to describe a kind
PLACE_COST = 2.0  # bits for start and stop: the wrong tokens determine them almost exactly
ODD_COST = 4.0  # bits for each edge that is neither a block border nor an event
MIN_RIGHT = 6  # right tokens after the first wrong one; one of them shows where tokens were moved
BLANK_KINDS = ("zeros", "unreadable")  # kinds for which blanks are sufficient evidence
SHIFTED_KINDS = ("own", "another", "earlier occupant")  # kinds whose keys may be rotated to another position


@dataclass(frozen=True)
class Hypothesis:
    """worth: bits of wrong digits predicted, minus the bits to describe the explanation, minus VAGUE_COST per unpredicted token.

    naming_cost: bits of wrong digits predicted, minus the bits to describe which request they belong to.
    """

    finding: Diagnosis
    score: float
    naming_cost: float


def rank_hypotheses(case: Case, found: list[ShiftedMatch]) -> Iterator[Hypothesis]:
    """Return the explanations that contradict no token of the engine."""
    yield from _window_hypotheses(case)
    yield from _token_hypotheses(case, found)
    moments = [moment for moment in _likely_moments(case) if moment <= case.first_query]
    for change, finding, name in _candidate_changes(case, found):
        for layers in layer_sets(case):
            if finding.kind == "layer" and any(map(case.canary.looks_up, (*layers, finding.shift))):
                continue
            whole = finding.kind in ("unreadable", "turned") or (finding.kind in SHIFTED_KINDS and finding.shift != 0)
            places = candidate_extents(case, layers, whole and finding.part != "values")
            if finding.stop:
                places = [(start, finding.stop) for start, _ in places]
            fit = fit_corruption(case, change, layers, places, moments)
            if finding.kind == "swapped" and fit and not fit.damage.start < finding.stop - finding.shift < fit.damage.stop:
                continue  # only one of the two blocks was read
            if fit is not None:
                yield score_corruption(case, fit, finding, name)


def score_corruption(case: Case, fit: CorruptionExtent, finding: Diagnosis, name: float, shift: int | None = None) -> Hypothesis:
    """The hypothesis of a fitting damage. name: see _score_hypothesis. shift: that of the finding, if it is not set yet."""
    finding = finding if shift is None else replace(finding, shift=shift)
    cost = KIND_COST + PLACE_COST + ODD_COST * _count_odd_facts(case, fit) + math.log2(1 + case.canary.num_layers)
    return _score_hypothesis(case, fit.said, cost, _add_place(case, finding, fit), name)


def _score_hypothesis(case: Case, said: Answers, cost: float, finding: Diagnosis, name: float = 0.0) -> Hypothesis:
    """name: the part of the cost that only digits can outweigh: a blank does not identify a request."""
    evidence = case.evidence(said, blanks=not finding.open)
    named = math.inf if finding.kind in BLANK_KINDS else case.evidence(said) - name
    return Hypothesis(finding, evidence - name - cost - VAGUE_COST * case.num_undetermined(said), named)


def layer_sets(case: Case) -> list[tuple[int, ...]]:
    """Return all layers together, and each alone. If the last layer recalls, damage in all layers shows in the last one."""
    layers = range(case.canary.num_layers)
    single: list[tuple[int, ...]] = [(layer,) for layer in layers]
    return single if case.canary.recalls or len(layers) == 1 else [tuple(layers), *single]


def _likely_moments(case: Case) -> list[int]:
    """Return the likeliest moments of damage: the first wrong query, the first generated token, and each event.

    A canary that recalls looks back one token in all layers except the last. Its answers hardly show when those were damaged.
    """
    spoke = [] if case.canary.recalls else [min(case.request.said, default=len(case.request.tokens))]
    return list(dict.fromkeys([case.first_query, *spoke, *(position for position, _ in case.request.events)]))


def _count_odd_facts(case: Case, fit: CorruptionExtent) -> int:
    """Return the number of odd edges, plus one if the damage happened at no likely moment."""
    start, stop = fit.block or (fit.damage.start, fit.damage.stop)
    odd = _count_odd_edges(case, (start,) if fit.open else (start, stop))
    return odd + (fit.damage.since not in (*_likely_moments(case), fit.damage.start))


def _count_odd_edges(case: Case, edges: Sequence[int]) -> int:
    """Return the number of edges that are neither at a block border nor at an event."""
    likely = [position for position, _ in case.request.events]
    return sum(edge % BLOCK_SIZES[0] != 0 and edge not in likely for edge in edges)


def _add_place(case: Case, finding: Diagnosis, fit: CorruptionExtent) -> Diagnosis:
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


def _candidate_changes(case: Case, found: list[ShiftedMatch]) -> Iterator[tuple[Change, Diagnosis, float]]:
    """Return each change with its finding and the bits to describe it."""
    canary, name = case.canary, case.request.name
    yield zeroed_entries("values"), Diagnosis("zeros", name, part="values"), 0.0
    yield zeroed_entries("keys"), Diagnosis("unreadable", name, part="keys"), 0.0
    for layer in range(canary.num_layers):
        yield entries_of_layer(case.clean_oracle, layer), Diagnosis("layer", name, shift=layer), 0.0
    for head in range(canary.num_kv_heads):
        yield entries_of_head(head), Diagnosis("head", name, shift=head), 0.0
    for by in range(1, canary.num_kv_heads if len(case.wrong_heads) > 1 else 1):
        yield rotated_heads(by), Diagnosis("heads", name, shift=by), 0.0
    for by in dict.fromkeys(-run.shift for run in found if run.source is case.request):
        yield rotated_keys(by), Diagnosis("turned", name, shift=by, part="keys"), naming_cost(case, case.request, by)
    for run in found:
        own = run.source is case.request
        oracle = None if own else case.oracle_of(run.source)
        kind = "own" if own else "earlier occupant" if run.source.ended else "another"
        stale = run.shift > 0 and case.is_earlier_state(run.source)
        for number, part in enumerate(PARTS if run.shift or canary.recalls else PARTS[:1]):
            named = "stale" if stale and part == "values" else kind
            finding = Diagnosis(named, name, part=part, other=None if own else run.source.name, shift=run.shift)
            yield entries_of(oracle, run.shift, part), finding, run.selection_cost(case) + number
        if own and run.shift % BLOCK_SIZES[0] == 0:
            by, place = abs(run.shift), int(case.places[case.wrong[0], -1])
            first = place // by - (run.shift < 0)
            for number, part in enumerate(PARTS[:2]):
                finding = Diagnosis("swapped", name, part=part, shift=by, stop=(first + 2) * by)
                yield swapped_blocks(by, first, part), finding, run.selection_cost(case) + number


def _window_hypotheses(case: Case) -> Iterator[Hypothesis]:
    """Try windows that are off by one or two tokens, in each layer and in all. A still wider window gives the same tokens."""
    windows = case.canary.windows
    for by in (-2, -1, 1):
        for layers in layer_sets(case):
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
                yield _score_hypothesis(case, said, KIND_COST, finding)


def _token_hypotheses(case: Case, found: list[ShiftedMatch]) -> Iterator[Hypothesis]:
    """Try tokens that the engine dropped, received twice or did not forget: every later entry has moved."""
    for run in found:
        for finding, tokens in _token_edits(case, run):
            said = case.replay_with_tokens(tokens)
            if not case.conflicts(said):
                edges = (finding.start,) if finding.kind == "left over" else (finding.start, finding.stop)
                odd = _count_odd_edges(case, edges)
                yield _score_hypothesis(case, said, KIND_COST + PLACE_COST + ODD_COST * odd, finding, run.selection_cost(case))


def _token_edits(case: Case, run: ShiftedMatch) -> Iterator[tuple[Diagnosis, list[int]]]:
    """Return edits that move tokens by the shift of a run, each with the resulting tokens of the engine."""
    told, name, by = case.tokens[: case.first_query + 1], case.request.name, abs(run.shift)
    right = [number for number in range(case.wrong[0], len(case.answers)) if number not in case.wrong][:MIN_RIGHT]
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
