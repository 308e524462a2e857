"""Output of `kvref check` during a run: failures as they are found, and a progress bar that moves while state machines run."""

import io

import pytest
from rich.console import Console

from kvref_conformance.implementations import load_implementation
from kvref_conformance.pytest_plugin import ClauseItem
from kvref_conformance.report.console_live import LiveReporter
from kvref_conformance.runner.check_runner import CheckRunner, select_checks
from kvref_conformance.runner.options import Effort, RunOptions
from kvref_conformance.runner.subprocess_runner import make_runner

WIDTH = 80


def failed(clause):
    return {"clause": clause, "title": "A title", "verdict": "failed"}


class Report:
    failed = True

    def __init__(self, result):
        self.kvref = result


@pytest.fixture
def live():
    """The standard error, as a terminal or not, and a session to report on."""

    def live(terminal=True, clauses="BLOCK-*"):
        err = Console(file=io.StringIO(), width=WIDTH, force_terminal=terminal, highlight=False)
        judge = CheckRunner(load_implementation("reference"), Effort(examples=10))
        made = LiveReporter(err, RunOptions("reference", judge.effort), judge)
        items = [object.__new__(ClauseItem) for _ in select_checks(clauses)]
        for item, checks in zip(items, select_checks(clauses).values(), strict=True):
            item.checks = checks
        made.pytest_collection_finish(type("Session", (), {"items": items})())
        return made, judge, err.file

    return live


def test_the_bar_is_of_clauses_and_sequences(live):
    made, judge, err = live()
    (task,), clauses = made._progress.tasks, len(select_checks("BLOCK-*"))
    assert (task.completed, task.total) == (0, clauses + 10)
    shown = []
    tried = judge.progress
    judge.progress = lambda *how_far: (tried(*how_far), shown.append((task.completed, task.description)))
    judge.search("blocks")
    assert shown[0] == (0, "blocks: 0 of 10 sequences")
    assert shown[3] == (3, "blocks: 3 of 10 sequences")
    assert shown[-1] == (10, "blocks: 10 of 10 sequences")
    made.pytest_runtest_logreport(Report(failed("BLOCK-01") | {"verdict": "passed"}))
    assert (task.completed, task.fields["done"], task.fields["clauses"]) == (11, 1, clauses)
    made.pytest_sessionfinish()
    assert "sequences" in err.getvalue()


def test_the_widest_bar_fits(live):
    made, *_ = live(clauses="*")
    made._show_search_progress("contiguous", 1999, 2000)
    made._progress.update(made._task, done=140)
    console = Console(file=io.StringIO(), width=WIDTH)
    console.print(made._progress.get_renderable())
    (line,) = console.file.getvalue().splitlines()
    assert "contiguous: 1999 of 2000 sequences" in line
    assert "140/" in line
    assert len(line.rstrip()) < WIDTH
    made.pytest_sessionfinish()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_failed_clause_is_named_at_once(live, terminal):
    made, _, err = live(terminal)
    made.pytest_runtest_logreport(Report(failed("BLOCK-01")))
    assert "failed: BLOCK-01 · A title" in err.getvalue()
    made.pytest_sessionfinish()
    assert ("\x1b" in err.getvalue()) == terminal


def test_nothing_moves_where_there_is_no_terminal(live):
    made, judge, err = live(terminal=False)
    judge.search("blocks")
    made.pytest_runtest_logreport(Report(failed("BLOCK-01") | {"verdict": "passed"}))
    made.pytest_sessionfinish()
    assert err.getvalue() == ""


def test_a_child_tells_how_far_it_has_come():
    judge = make_runner(RunOptions("numpy", Effort(examples=4), isolate=True))
    told = []
    judge.progress = lambda *how_far: told.append(how_far)
    judge.search("blocks")
    judge.close()
    assert [told[0], told[2], told[-1]] == [("blocks", 0, 4), ("blocks", 2, 4), ("blocks", 4, 4)]
