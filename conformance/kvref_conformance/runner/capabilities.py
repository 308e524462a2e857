"""Detects which operations an implementation provides, by calling each of them once."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.subject import Subject
from kvref_conformance.clauses import Clause
from kvref_conformance.drivers.json_client import JsonClient
from kvref_conformance.exceptions import CallTimeout, ClauseViolation, NotOffered
from kvref_conformance.families import all_families
from kvref_conformance.implementation_api import offers
from kvref_conformance.limits import Limits
from kvref_conformance.results import CheckResult
from kvref_conformance.runner.causes import PRODUCTION_SIZES_CLAUSE
from kvref_conformance.runner.check_runner import CheckRunner, Failure
from kvref_conformance.runner.restricted import RestrictedImplementation
from kvref_conformance.testlib.fixtures import new_object
from kvref_conformance.testlib.registry import Check
from kvref_conformance.testlib.sample_calls import ResultByName, SampleCalls, Sizes, operation_of

ELEMENTS = ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16")
ROWS = ("int8", "float8_e4m3fn", "float8_e5m2", "q8", "q4")
HEADS, DIM = 2, 5  # for arguments of objects that have no such sizes


@dataclass(frozen=True)
class OperationStatus:
    """The provided and the missing operations of one family ("paged.read").

    unmade: why no object could be created, in which case both lists are empty; otherwise "". reasons: why the implementation
    declines a missing operation, if its NotOffered has a message.
    """

    operations: list[str]
    missing: list[str]
    unmade: str = ""
    reasons: dict[str, str] = field(default_factory=dict)


def probe_operations(judge: CheckRunner, families: Sequence[str]) -> dict[str, OperationStatus]:
    """The operations by family, for the offered ones among `families`. For `CheckRunner.run`.

    Raises CallTimeout if a call does not return.
    """
    return {family: _probe_family(judge.begin(), family) for family in families if offers(judge.implementation, family)}


def sample_calls_of(subject: Subject, config: Mapping[str, Any], dim: int = DIM) -> SampleCalls:
    """One call of each operation of the subject's family, for an object of these sizes, in a supported format if there is one.

    dim: numbers per row, if the object has no head_dim.
    """
    family, limits, formats = subject.family, subject.limits, subject.implementation.formats
    among = ELEMENTS if family == "elements" else ROWS
    format = next((name for name in among if name in formats), among[0])
    heads, width = limits.nearest(family, "num_kv_heads", HEADS), row_width(limits, family, dim)
    sizes = Sizes(config.get("num_kv_heads", heads), config.get("head_dim", width), config.get("num_layers", 1), format, config)
    found: SampleCalls = all_families()[family].interface.sample_calls(sizes)
    return found


def row_width(limits: Limits, family: str, wanted: int) -> int:
    """Numbers per row of arguments, for objects without head_dim."""
    found: int = limits.nearest(family, "width" if family == "rows" else "head_dim", wanted)
    return found


def was_executed(subject: Subject, op: str) -> bool:
    """Whether the implementation itself executed the operation. Otherwise it was declined, and may have been derived."""
    return any(exchange.request.op == op for exchange in subject.call_trace)


def _probe_family(subject: Subject, family: str) -> OperationStatus:
    subject.family = family
    try:
        made = new_object(subject, family)
    except (NotOffered, ClauseViolation) as error:
        why = f"expected {error.expected}, got {error.got}" if isinstance(error, ClauseViolation) else str(error)
        return OperationStatus([], [], " ".join(why.split()) or "no reason given")
    steps = sample_calls_of(subject, made.config)
    objects, got, found = {family: made.id}, ResultByName(), list[str]()
    for step, arguments in steps.items():
        op = operation_of(step)
        try:
            got[step] = subject.call(op, objects[op.partition(".")[0]], arguments(got))
        except CallTimeout:
            raise
        except KeyError as lacking:  # an argument is the result of another operation, which is missing or failed
            found += [op] if operation_of(lacking.args[0]) in found else []  # failed: assume that this operation is provided
        except Exception:  # it is provided; whether the error is correct does not matter here
            pass
        if was_executed(subject, op) and op not in found:
            found.append(op)
        if isinstance(got.get(step), ObjectProxy):
            objects["buffer"] = got[step].id
    missing = [op for op in dict.fromkeys(map(operation_of, steps)) if op not in found]
    said = {op: subject.declined.get(op, "").removeprefix(op).strip(": ") for op in missing}
    given = {
        op: reason.removeprefix("(").removesuffix(")") if reason.startswith("(") else reason
        for op, reason in said.items()
        if reason
    }
    return OperationStatus(found, missing, reasons=given)


# A preview for `kvref check NAME --list`: the clauses that can be judged, and those that one more operation would add.
#
# The implementation itself is not judged. Instead, the checks run on kvref's own caches, restricted to the same operations,
# formats and limits (runner/restricted.py). These caches are correct, so each check that is not "not offered" there can judge.

SelectedChecks = Mapping[Clause, Sequence[Check]]


@dataclass
class ClauseReach:
    """The checks of one clause in one family.

    checks: how many there are. judged: how many can judge. through: the derived operations that those use. missing: the reasons
    why the others cannot judge.
    """

    clause: str
    family: str
    checks: int = 0
    judged: int = 0
    through: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def how(self) -> str:
        """The result in one or two words."""
        if not self.judged:
            return "not offered"
        if self.judged < self.checks:
            return "partly"
        return "derived" if self.through else "directly"


@dataclass(frozen=True)
class Gain:
    """The benefit of providing one more operation: the number of additional checks that could judge, and their clauses."""

    operation: str
    checks: int
    clauses: list[str]


@dataclass(frozen=True)
class CoveragePreview:
    reaches: list[ClauseReach]
    gains: list[Gain]  # sorted by the number of checks, largest first


def preview_coverage(implementation: Any, surface: Mapping[str, OperationStatus], chosen: SelectedChecks) -> CoveragePreview:
    """Preview the chosen clauses. surface: the provided operations of each family.

    State machines, LONG, and checks that need an option are left out.
    """
    made = {family: each for family, each in surface.items() if not each.unmade}
    operations = {op for each in made.values() for op in each.operations}
    every = [each for of_clause in chosen.values() for each in of_clause if each.run and each.family in made]
    # The checks at production sizes take as long as all others together: too long to run once per operation.
    checks = [each for each in every if not each.option and each.clause != PRODUCTION_SIZES_CLAUSE]
    said, declined = _judge_checks(implementation, made, operations, checks)
    reaches: dict[tuple[str, str], ClauseReach] = {}
    for check, outcome in zip(checks, said, strict=True):
        reach = reaches.setdefault((check.clause, check.family), ClauseReach(check.clause, check.family))
        reach.checks += 1
        reach.judged += not outcome.missing
        if outcome.missing:
            reach.missing = list(dict.fromkeys([*reach.missing, outcome.missing]))
        else:
            reach.through = sorted({*reach.through, *outcome.through})
    lacking = {check: ops for check, outcome, ops in zip(checks, said, declined, strict=True) if outcome.missing}
    gains = [_gain_of(implementation, made, operations, op, lacking) for each in made.values() for op in each.missing]
    return CoveragePreview(list(reaches.values()), sorted((each for each in gains if each.checks), key=lambda gain: -gain.checks))


class _RestrictedRunner(CheckRunner):
    """A judge of a restricted wrapper. by_value: whether the implementation is reached through a pipe."""

    def __init__(self, restricted: RestrictedImplementation, by_value: bool) -> None:
        super().__init__(restricted)
        self._by_value = by_value
        self._subjects: list[Subject] = []

    def begin(self, check: Check | None = None) -> Subject:
        subject = super().begin(check)
        subject.by_value = self._by_value
        self._subjects.append(subject)
        return subject

    def judge_and_list_declined(self, check: Check) -> tuple[CheckResult, set[str]]:
        """Return the result of a check, and the operations that it called and that are not provided."""
        self._subjects.clear()
        result = self.judge_check(check)
        if isinstance(result, Failure):
            result = CheckResult(check.name, "failed", through=list(result.derivations_used))
        return result, {op for subject in self._subjects for op in subject.declined}


def _without_counting(limits: Mapping[str, Any]) -> dict[str, Any]:
    """The limits, in general and of each family, without the switches that wrap an implementation."""
    counting = {name for family in all_families().values() for name in family.counted_as}
    named = {name: _without_counting(value) if name in all_families() else value for name, value in limits.items()}
    return {name: value for name, value in named.items() if name not in counting}


def _judge_checks(
    implementation: Any, families: Mapping[str, OperationStatus], operations: set[str], checks: Iterable[Check]
) -> tuple[list[CheckResult], list[set[str]]]:
    """Return the results, and the operations that each check called and that are not provided."""
    limits = getattr(implementation, "limits", None) or {}
    # These limits change how blocks are counted, not what can be judged, and kvref's own caches count as the specification does.
    limits = _without_counting(limits)
    restricted = RestrictedImplementation(limits, operations, families, implementation.formats, implementation.level)
    judge = _RestrictedRunner(restricted, isinstance(implementation, JsonClient))
    found = [judge.judge_and_list_declined(check) for check in checks]
    return [result for result, _ in found], [declined for _, declined in found]


def _gain_of(
    implementation: Any, families: Mapping[str, OperationStatus], operations: set[str], op: str,
    lacking: Mapping[Check, set[str]],
) -> Gain:  # fmt: skip
    """lacking: the checks for which operations are missing, with those that they called. Any other check stays as it is."""
    concerned = [check for check, declined in lacking.items() if op in declined]
    said, _ = _judge_checks(implementation, families, {*operations, op}, concerned)
    more = [check for check, outcome in zip(concerned, said, strict=True) if not outcome.missing]
    return Gain(op, len(more), list(dict.fromkeys(check.clause for check in more)))
