"""Stale verdicts: since the run, the text of the clause changed, or the suite got a check of it that the run did not have."""

from collections import defaultdict

from kvref_conformance.clauses import all_clauses
from kvref_conformance.report.results_model import ResultFile
from kvref_conformance.testlib.registry import all_checks


def stale_clauses(run: ResultFile) -> dict[str, str]:
    """Why the results for a clause are stale, by clause, in the order of the specification.

    A renamed check counts as a new one. Clauses that were not selected for the run are not stale.
    """
    families = run.document["implementation"]["families"]
    checks: dict[str, list[str]] = defaultdict(list)
    for check in all_checks():
        if check.family in families:
            checks[check.clause].append(check.name)
    selected_all = run.document["conclusion"]["whole"]
    reasons = {}
    for id, clause in all_clauses().items():
        result = run.verdicts.get(id)
        if result and result["offered"] and result["digest"] != clause.digest:
            reasons[id] = "its text changed"
        elif result or selected_all:
            known = {check["check"] for check in result["checks"]} if result else set()
            if new := [name for name in checks[id] if name not in known]:
                more = f" and {len(new) - 1} more" if len(new) > 1 else ""
                reasons[id] = f"new check: {new[0]}{more}" if result else "it is new"
    return reasons
