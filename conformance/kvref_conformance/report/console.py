"""The text output of a run: failures, the table of results, and the verdict."""

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvref_conformance.clauses import all_clauses, spec
from kvref_conformance.results import Result
from kvref_conformance.runner.capabilities import ClauseReach, CoveragePreview, OperationStatus
from kvref_conformance.runner.causes import PRODUCTION_SIZES_CLAUSE, ProbableCause, ShownFailure, probable_causes
from kvref_conformance.runner.options import RunOptions
from kvref_conformance.runner.verdict import RunVerdict, is_counted, needs_missing_formats
from kvref_conformance.testlib.registry import citation

VERDICTS = ("passed", "failed", "xfailed", "xpassed", "not offered", "not run")
RARE_VERDICTS = ("xfailed", "xpassed", "not run")  # columns that are shown only if a clause has this verdict
WHY_NOT_RUN = {"--slow": "needs gigabytes of memory", "--real": "takes seconds"}
MAX_NAMED = 3  # clauses or operations that are listed in one line
MAX_FAILURE_LINES = 32  # of all failures that are printed in full, so that they fit on a screen with the table and the verdict
LINES_BESIDES_CALLS = 10  # of a failure that is printed in full
MAX_LINES_OF_A_MESSAGE = 6
MAX_SHOWN_OTHERS = 6  # further clauses of a cause, or further causes, that have a line of their own
STYLES = {
    "conformant": "bold green",
    "not conformant": "bold red",
    "not conformant, as expected": "bold yellow",
    "not judged": "bold yellow",
}


def failure_text(failure: ShownFailure, run_options: RunOptions, found_by: Iterable[str]) -> str:
    """The clause, the calls, the expected and the actual value, and the commands to replay, repeat and explain the failure.

    found_by: the names of all checks of the clause that failed.
    """
    shown = failure.check
    lines = [f"{_heading(failure)}   ({run_options.name})", *(f"  {call}" for call in shown["calls"])]
    lines += [f"    {shown['what']}", f"    expected {shown['expected']}", f"    got      {_clip_lines(shown['got'])}"]
    lines += [f"    at       {shown['where']}"] if shown["where"] else []
    lines += [f"    cause    {shown['cause']}"] if shown.get("cause") else []
    if failure.root_clause != failure.clause:
        lines += [f"  model    these calls break {failure.root_clause} · {all_clauses()[failure.root_clause].title}"]
    lines += [f"  found by {'; '.join(_with_letters(failure.clause, name) for name in found_by)}"]
    derived = shown.get("through", ())
    lines += [f"  derived  {way}" for way in derived] if len(derived) <= MAX_NAMED else [f"  derived  {len(derived)} operations"]
    lines += [f"  replay   kvref replay {shlex.quote(shown['trace'])} {shlex.quote(run_options.name)}"] if shown["trace"] else []
    lines += [f"  again    {run_options.repeat_command(failure.clause)}", f"  read     kvref explain {failure.clause}"]
    return "\n".join(lines)


def _clip_lines(text: str) -> str:
    """The text without its last lines, if it has many: the message of an error may contain a whole traceback."""
    lines = text.splitlines()
    if len(lines) <= MAX_LINES_OF_A_MESSAGE:
        return text
    left = lines[: MAX_LINES_OF_A_MESSAGE - 1]
    return "\n".join([*left, f"    ... {len(lines) - len(left)} more lines, which the trace has"])


def _heading(failure: ShownFailure) -> str:
    return f"{failure.clause} · {failure.title}"


def _with_letters(clause: str, check: str) -> str:
    """A check's name. If the clause has lettered requirements, also which of them the check tests."""
    tested = citation(clause, check)
    return check if tested == clause else f"{check}: {tested}"


def print_failures(console: Console, results: list[Result], run_options: RunOptions, show_all: bool) -> None:
    """Each probable cause: its most direct failure in full, and one line per further clause that it breaks.

    Unless show_all, only the first causes are printed, as many as fit on a screen, and one line for each other cause.
    """
    failed_checks = {
        each["clause"]: [check["check"] for check in each["checks"] if check["verdict"] == "failed"] for each in results
    }

    def print_in_full(failure: ShownFailure) -> None:
        heading, _, rest = failure_text(failure, run_options, failed_checks[failure.clause]).partition("\n")
        console.print(Text(heading, style="bold red"), soft_wrap=True)
        console.print(Text(rest), soft_wrap=True)

    causes = probable_causes(results)
    if show_all:
        for failure in (failure for cause in causes for failure in (cause.first, *cause.others)):
            print_in_full(failure)
            console.print()
        return
    shown = _num_in_full(causes)
    for cause in causes[:shown]:
        print_in_full(cause.first)
        _print_others(console, cause)
        console.print()
    for cause in causes[shown:]:
        _print_clauses(console, [cause.first], "")
        if cause.others:
            console.print(Text(f"    also {', '.join(cause.clauses[1:])}"), soft_wrap=True)
    if causes[shown:]:
        console.print(Text(f"shown by {run_options.repeat_command(causes[shown].first.clause)}, or by --all", style="dim"))
        console.print()


def _num_in_full(causes: Sequence[ProbableCause]) -> int:
    """How many causes are printed in full: the first, and further ones while all have at most MAX_FAILURE_LINES lines."""
    lengths = (
        len(cause.first.check["calls"]) + LINES_BESIDES_CALLS + min(len(cause.clauses) - 1, MAX_SHOWN_OTHERS) for cause in causes
    )
    return max(1, sum(total <= MAX_FAILURE_LINES for total in accumulate(lengths)))


def _print_others(console: Console, cause: ProbableCause) -> None:
    others = {each.clause: each for each in reversed(cause.others)}
    if cause.clauses[1:]:
        console.print(Text("  also fail, probably for the same reason:"))
    _print_clauses(console, [others[clause] for clause in cause.clauses[1:]], "    ")


def _print_clauses(console: Console, failures: Sequence[ShownFailure], indent: str) -> None:
    """One line per failure, up to MAX_SHOWN_OTHERS; the rest by the names of their clauses."""
    for failure in failures[:MAX_SHOWN_OTHERS]:
        console.print(Text(f"{indent}{_clause_line(failure)}"), no_wrap=True, overflow="ellipsis")
    if rest := [failure.clause for failure in failures[MAX_SHOWN_OTHERS:]]:
        console.print(Text(f"{indent}and {', '.join(rest)}"), soft_wrap=True)


def _clause_line(failure: ShownFailure) -> str:
    return f"{failure.clause} ({count_noun(failure.evidence.calls, 'call')}) · {failure.title}"


def causes_text(causes: Sequence[ProbableCause]) -> str:
    """What to look at first, and how many other clauses the same causes probably break."""
    named = ", ".join(f"{each.first.clause} ({count_noun(each.first.evidence.calls, 'call')})" for each in causes)
    more = len({clause for each in causes for clause in each.clauses} - {each.first.clause for each in causes})
    explained = f". {count_noun(more, 'more clause')} {'fails' if more == 1 else 'fail'}, probably for the same reason"
    return f"{count_noun(len(causes), 'probable cause')}: {named}{explained if more else ''}"


def print_table(console: Console, results: list[Result], implementation: Any, interrupted: bool = False) -> None:
    """One line per chapter: how many clauses that count passed, failed, or are not offered. Below: chapters without one."""
    title = f"{implementation.name} {implementation.version} ({implementation.language}, {implementation.level})"
    table = Table(title=escape(title), title_justify="left", box=box.SIMPLE_HEAD, title_style="bold", show_footer=True)
    shown = [each for each in results if is_counted(each)]
    verdicts = [each for each in VERDICTS if each not in RARE_VERDICTS or any(r["verdict"] == each for r in shown)]
    table.add_column("chapter", footer="all")
    for verdict in verdicts:
        count = sum(result["verdict"] == verdict for result in shown)
        table.add_column(verdict, justify="right", footer=str(count))
    for chapter in spec():
        tally = Counter(result["verdict"] for result in shown if result["chapter"] == chapter.code)
        if tally:
            cells = [_table_cell(verdict, tally[verdict]) for verdict in verdicts]
            table.add_row(f"{chapter.code} {escape(chapter.title)}", *cells)
    console.print(table)
    others = {each["chapter"] for each in results} - {each["chapter"] for each in shown}
    if others and not interrupted:
        named = ", ".join(chapter.code for chapter in spec() if chapter.code in others)
        console.print(Text(f"chapters without a clause that applies: {named}", style="dim"))


def print_left_out(console: Console, results: list[Result]) -> None:
    """Why clauses of offered families were not judged: the reasons, the most frequent first."""
    lacking: dict[str, list[str]] = {}
    for each in results:
        if is_counted(each) and each["verdict"] == "not offered":
            lacking.setdefault(", ".join(each["missing"]), []).append(each["clause"])
    for reason, clauses in sorted(lacking.items(), key=lambda entry: -len(entry[1])):
        more = f" and {len(clauses) - MAX_NAMED} more" if len(clauses) > MAX_NAMED else ""
        console.print(Text(f"not offered: {reason} ({', '.join(clauses[:MAX_NAMED])}{more})", style="dim"), soft_wrap=True)


def print_derived(console: Console, results: list[Result]) -> None:
    """The derived operations that the judge used in place of missing ones, and for how many clauses."""
    clauses: dict[str, int] = Counter(way for each in results for way in each.get("through", ()))
    for way, count in clauses.items():
        console.print(Text(f"derived: {way} ({count_noun(count, 'clause')})", style="dim"), soft_wrap=True)


def count_noun(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def conclusion_text(conclusion: RunVerdict, broken: Iterable[str] = ()) -> str:
    """The verdict and its reason in one line. broken: the clauses that failed."""
    verdict, share = conclusion.verdict, conclusion.share
    if verdict == "not judged":
        least = f", less than {conclusion.least:g} % (--least-judged)" if conclusion.judged else ""
        return f"not judged: {share} have a verdict{', but the run was interrupted' if conclusion.is_enough else least}"
    if verdict == "conformant":
        if conclusion.whole:
            return f"conformant: {share} judged, all passed"
        return f"conformant for the selected clauses: {conclusion.judged} of {conclusion.of} judged, all passed"
    if verdict == "not conformant, as expected":
        return f"{verdict}: only expected failures; {share} judged"
    breaks = f": breaks {', '.join(broken)}" if broken else ""
    return f"{verdict}{breaks}; {share} judged"


def print_conclusion(console: Console, results: list[Result], conclusion: RunVerdict) -> None:
    """The clauses that need an option to run, the expected failures, what to look at first, and the verdict."""
    named = {verdict: [each["clause"] for each in results if each["verdict"] == verdict] for verdict in VERDICTS}
    for option, takes in WHY_NOT_RUN.items():
        not_run = [each["clause"] for each in results if each["verdict"] == "not run" and option in each["missing"]]
        if not_run:
            console.print(Text(f"not run: {', '.join(not_run)} ({takes}; {option} includes it)", style="dim"))
    for each in results:
        if each["verdict"] == "xfailed":
            reason = f": {each['reason']}" if each["reason"] else ""
            console.print(Text(f"expected failure: {each['clause']} · {each['title']}{reason}", style="dim"), soft_wrap=True)
    if named["xpassed"]:
        passed = f"expected to fail, but passed: {', '.join(named['xpassed'])} (--update-xfails removes them from the file)"
        console.print(Text(passed, style="bold yellow"), soft_wrap=True)
    _print_causes(console, results)
    console.print(Text(conclusion_text(conclusion, named["failed"]), style=STYLES[conclusion.verdict]), soft_wrap=True)


def _print_causes(console: Console, results: list[Result]) -> None:
    causes = probable_causes(results)
    if sum(len(cause.clauses) for cause in causes) > 1:
        hidden = any(cause.others for cause in causes) or len(causes) > _num_in_full(causes)
        console.print(Text(f"{causes_text(causes)}{'; --all shows every failure' if hidden else ''}"), soft_wrap=True)


def print_interrupted(console: Console, results: list[Result], of: int) -> None:
    """The verdict of a run that Ctrl-C ended early."""
    failed = [each["clause"] for each in results if each["verdict"] == "failed"]
    _print_causes(console, results)
    if failed:
        console.print(Text(f"not conformant: breaks {', '.join(failed)}", style="bold red"))
    judged = sum(each["verdict"] in ("passed", "failed") for each in results)
    others = f"{len(results) - judged} not offered, {of - len(results)} did not run"
    said = f"interrupted: {judged} of {of} clauses judged, {others}"
    console.print(Text(said, style="bold yellow"))


def _table_cell(verdict: str, count: int) -> str:
    style = {"passed": "green", "failed": "bold red"}.get(verdict, "dim") if count else "dim"
    return f"[{style}]{count or '·'}[/]"


# The output of `kvref check NAME --list`: one table per family, and the benefit of each missing operation.

REACH_STYLES = {"derived": "green", "partly": "yellow", "not offered": "dim"}


def print_reach(console: Console, surface: Mapping[str, OperationStatus], found: CoveragePreview) -> None:
    for family, offered in surface.items():
        if offered.unmade:
            console.print(Text(f"{family}: no object can be made: {offered.unmade}", style="bold"), soft_wrap=True)
        else:
            _print_family(console, family, offered, [reach for reach in found.reaches if reach.family == family])
    for gain in found.gains:
        console.print(Text(gain_text(gain.operation, gain.checks, gain.clauses)), soft_wrap=True)
    console.print(Text(f"not included: {PRODUCTION_SIZES_CLAUSE}, whose checks take longer", style="dim"))


def gain_text(operation: str, checks: int, clauses: list[str]) -> str:
    more = f" and {len(clauses) - MAX_NAMED} more" if len(clauses) > MAX_NAMED else ""
    return f"offer {operation}: {count_noun(checks, 'more check')} ({', '.join(clauses[:MAX_NAMED])}{more})"


def _print_family(console: Console, family: str, offered: OperationStatus, reaches: list[ClauseReach]) -> None:
    judged = sum(reach.judged > 0 for reach in reaches)
    # as `kvref check` counts
    count = sum(reach.judged > 0 or not needs_missing_formats(reach.clause, reach.missing) for reach in reaches)
    console.print(Text(f"{family}: {judged} of {count_noun(count, 'clause')} can be judged", style="bold"))
    if all(reach.how == "directly" for reach in reaches):
        return
    lists = Table.grid(padding=(0, 2, 0, 0))
    for word, named in (
        ("offered", [strip_family(family, op) for op in offered.operations]),
        ("missing", [_with_reason(strip_family(family, op), offered.reasons.get(op, "")) for op in offered.missing]),
        ("directly", [reach.clause for reach in reaches if reach.how == "directly"]),
    ):
        lists.add_row(f"  {word}", Text(", ".join(named) or "none"))
    console.print(lists)
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("clause", no_wrap=True)
    table.add_column("judged", no_wrap=True)
    table.add_column("derived operations; not offered")
    for reach in reaches:
        if reach.how != "directly":
            table.add_row(reach.clause, Text(reach.how, REACH_STYLES[reach.how]), Text(reach_detail(reach)))
    console.print(table)


def _with_reason(operation: str, reason: str) -> str:
    return f"{operation} ({' '.join(reason.split())})" if reason else operation


def reach_detail(reach: ClauseReach) -> str:
    """The derived operations that the checks use, and what is missing for the checks that cannot judge."""
    through = ", ".join(strip_family(reach.family, way) for way in reach.through)
    missing = ", ".join(strip_family(reach.family, reason) for reason in reach.missing)
    if reach.how == "partly":
        part = f"{reach.judged} of {count_noun(reach.checks, 'check')}"
        return "; ".join(filter(None, (part, through, f"not offered: {missing}")))
    return "; ".join(filter(None, (through, missing)))


def strip_family(family: str, words: str) -> str:
    """Remove the name of the family from an operation."""
    return words.removeprefix(f"{family}.")


def reach_as_json(surface: Mapping[str, OperationStatus], found: CoveragePreview) -> dict[str, Any]:
    """The same content as JSON data."""
    families = {
        family: {
            "offered": offered.operations,
            "missing": offered.missing,
            "unmade": offered.unmade or None,
            "clauses": [
                {
                    "clause": reach.clause, "how": reach.how, "checks": reach.checks, "judged": reach.judged,
                    "through": reach.through, "missing": reach.missing,
                }
                for reach in found.reaches if reach.family == family
            ],
        }
        for family, offered in surface.items()
    }  # fmt: skip
    return {"families": families, "gains": [vars(gain) for gain in found.gains]}
