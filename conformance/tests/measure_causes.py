"""How often the first failure that `kvref check` prints leads to the bug: over the zoo, and over a sample of the planted bugs.

    python conformance/tests/measure_causes.py zoo|planted [COUNT] [--part I/N]

A bug was planted for a clause. The first failure is exact if it is of this clause. It is as direct if the model blames its own
clause, with at most as many calls as the failure of the planted clause has, or if it blames the same clause for both failures.
Prints one line per bug, and the shares. It takes hours for all bugs: run it by hand.
"""

import argparse
import io
import random
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import kvref_zoo
from kvref.backend import ReferenceBackend
from kvref_conformance.families import names as families
from kvref_conformance.implementation_api import offers
from kvref_conformance.implementations.backends import OnBackend
from kvref_conformance.report.console import print_conclusion, print_failures, print_table
from kvref_conformance.runner.causes import probable_causes, shown_failures
from kvref_conformance.runner.check_runner import CheckRunner, Failure, clause_result, select_checks
from kvref_conformance.runner.options import Effort, RunOptions
from kvref_conformance.runner.verdict import overall_verdict

SCREEN = 50  # lines


@dataclass(frozen=True)
class Measured:
    """One bug. wanted: the clause that it was planted for. first: the clause that is printed first, "" if none fails."""

    name: str
    wanted: str
    first: str
    exact: bool
    as_direct: bool
    causes: int
    broken: int
    lines: int


def measure(name: str, wanted: str, implementation: Any, family: str) -> Measured:
    options = RunOptions(name, Effort(timeout=2.0), family)
    judge = CheckRunner(implementation, options.effort, name)
    selected = select_checks(family=family)
    results = [clause_result(judge, clause, checks, judge.judge_clause(checks), None) for clause, checks in selected.items()]
    causes = probable_causes(results)
    console = Console(file=io.StringIO(), width=80)
    print_failures(console, results, options, show_all=False)
    print_table(console, results, implementation)
    print_conclusion(console, results, overall_verdict(results, 0))
    lines = console.file.getvalue().count("\n")
    if not causes:
        return Measured(name, wanted, "", False, False, 0, 0, lines)
    first = causes[0].first
    own = [each for result in results if result["clause"] == wanted for each in shown_failures(result)]
    exact = first.clause == wanted
    blamed = bool(first.evidence.root) and first.root_clause == first.clause
    fewest = all(first.evidence.calls <= each.evidence.calls for each in own)
    as_direct = blamed and (fewest or first.clause in {each.root_clause for each in own})
    broken = sum(result["verdict"] == "failed" for result in results)
    return Measured(name, wanted, first.clause, exact, exact or as_direct, len(causes), broken, lines)


def measure_zoo() -> Iterator[tuple[str, Any]]:
    for name in kvref_zoo.names():
        member = kvref_zoo.member(name)
        (family,) = [each for each in families() if offers(member, each) and (each != "buffers" or name.startswith("buffers"))]
        yield name, lambda name=name, member=member, family=family: measure(name, member.clause, member, family)


def measure_planted() -> Iterator[tuple[str, Any]]:
    from bugs import BUGS

    for bug in BUGS:
        plant, clause, _ = bug.values
        yield str(bug.id), lambda bug=bug, plant=plant, clause=clause: _measure_planted(str(bug.id), plant, clause)


def _measure_planted(name: str, plant: Any, clause: str) -> Measured | None:
    """The bug in the first family whose checks of the clause notice it."""
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        implementation = OnBackend(ReferenceBackend())
        judge = CheckRunner(implementation, Effort(timeout=2.0))
        ((_, checks),) = select_checks(clause).items()
        for check in checks:
            if check.run and judge.effort.includes(check.option) and isinstance(judge.judge_check(check), Failure):
                return measure(name, clause, implementation, check.family)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bugs", choices=("zoo", "planted"))
    parser.add_argument("count", type=int, nargs="?", help="size of a random sample (default: all)")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="only the I-th of N parts, to run several at once")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # a bug can divide by zero
    sys.path.insert(0, str(Path(__file__).parent))
    bugs = list(measure_zoo() if options.bugs == "zoo" else measure_planted())
    if options.count:
        bugs = random.Random(0).sample(bugs, min(options.count, len(bugs)))
    part, of = map(int, options.part.split("/"))
    found = []
    for _, judge in bugs[part - 1 :: of]:
        if (measured := judge()) and measured.first:
            found.append(measured)
        print(measured, flush=True)
    total = max(len(found), 1)
    for name, count in (
        ("first failure of the planted clause", sum(each.exact for each in found)),
        ("first failure of the planted clause, or as direct", sum(each.as_direct for each in found)),
        ("one probable cause", sum(each.causes == 1 for each in found)),
        (f"at most {SCREEN} lines", sum(each.lines <= SCREEN for each in found)),
    ):
        print(f"{name}: {count} of {len(found)} ({100 * count / total:.0f} %)")


if __name__ == "__main__":
    main()
