"""Tables of the results in `docs/results/checks`."""

from functools import cache
from pathlib import Path

from generate_findings_index import findings_link
from kvref_conformance.clauses import spec
from kvref_conformance.report.json_file import read_json
from kvref_conformance.report.results_model import ResultFile
from kvref_conformance.report.staleness import stale_clauses

RESULTS = Path(__file__).parents[1] / "results/checks"
JUDGED = ("passed", "failed")
MARKS = {"passed": "✓", "failed": "**✗**", "not offered": "·"}


@cache
def committed_runs() -> tuple[ResultFile, ...]:
    """Return the committed results, kvref's own first."""
    runs = [ResultFile(path, read_json(path)) for path in sorted(RESULTS.glob("*.json"))]
    return tuple(sorted(runs, key=lambda run: (run.project != "kvref", run.project, run.name)))


def coverage_table() -> str:
    """A table with a row per implementation that is no engine: numbers of clauses judged, failed and stale."""
    lines = [
        "| implementation | project | families | judged | of these, by derived operations | failed | stale |",
        "|---|---|---|---|---|---|---|",
    ]
    for run in committed_runs():
        if _is_engine(run):
            continue
        about, conclusion = run.document["implementation"], run.conclusion
        derived = sum(bool(result.get("through")) for result in run.verdicts.values() if result["verdict"] in JUDGED)
        judged = f"{conclusion.judged} of {conclusion.of}" + (", **not judged**" if conclusion.verdict == "not judged" else "")
        counts = (derived, run.num_failed, len(stale_clauses(run)))
        lines.append(
            f"| {run.name} | {findings_link(run.name, run.project)} {about['version']}, {about['language']} "
            f"| {', '.join(about['families'])} | {judged} | {' | '.join(str(count or '') for count in counts)} |"
        )
    return "\n".join(lines) + "\n"


def engines_table() -> str:
    """A table with a row per engine and a column per clause of ENG."""
    clauses = next(chapter for chapter in spec() if chapter.code == "ENG").clauses
    lines = [
        f"| engine | {' | '.join(f'[{clause.id[4:]}](#{clause.id})' for clause in clauses)} |",
        f"|---|{'---|' * len(clauses)}",
    ]
    for run in sorted(filter(_is_engine, committed_runs()), key=lambda run: run.name):
        about = run.document["implementation"]
        marks = [MARKS[run.verdicts[clause.id]["verdict"]] for clause in clauses]
        engine = findings_link(run.name, run.name)
        lines.append(f"| **{engine}**<br>{about['version']}, {about['language']} | {' | '.join(marks)} |")
    return "\n".join(lines) + "\n"


def _is_engine(run: ResultFile) -> bool:
    return bool(run.document["implementation"]["families"] == ["engine"])
