"""`kvref lab`: lists, starts and checks the exercises of the course, and shows hints and solutions."""

import argparse
import runpy
import shutil
import tomllib
from collections.abc import Iterator
from contextlib import chdir, closing
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

import kvref_labs
from kvref_conformance.clauses import Clause
from kvref_conformance.exceptions import CannotRun, suggest
from kvref_conformance.report.console import count_noun, failure_text
from kvref_conformance.results import Result
from kvref_conformance.runner.causes import shown_failures
from kvref_conformance.runner.check_runner import CheckRunner, Failure, clause_result, select_checks
from kvref_conformance.runner.options import Effort, RunOptions
from kvref_conformance.runner.subprocess_runner import make_runner
from kvref_conformance.testlib.registry import Check
from kvref_conformance.traces.paths import save_failure
from kvref_labs import Lab, quiz

KINDS = {"write": "write a cache", "fix": "find a bug", "predict": "predict results"}
ADAPTER = "adapter:lab"  # the name of the student's cache, for `kvref check` in the student's folder
RECORD = "lab.toml"  # in the student's folder: which lab it is, and how many hints were shown
FAILURES = Path(".kvref/failures")
EXAMPLES = 40  # random call sequences
ADAPTER_TEXT = '''"""Connects cache.py with kvref, which calls it {name}. There is nothing to change here."""

import cache
from kvref_labs.adapter import Adapter

lab = Adapter({family!r}, cache.{factory}, formats={formats!r}, limits={limits!r})
'''
HOW_TO = """
## How to work

Edit `{file}`. Then run, in this folder:

```bash
kvref lab check       # what is wrong, or that the lab is solved
kvref lab hint        # the next of {hints}
kvref lab solution    # a solution
```
"""
DEBUGGING = f"""
kvref runs `cache.py` in a process of its own. To see what it prints, or to use a debugger, check one clause in the process of
kvref: `kvref check {ADAPTER} --clause {{clause}} --no-isolate`.
"""


def run_lab(options: argparse.Namespace) -> int:
    status: int = _COMMANDS[options.subcommand](options, Console(highlight=False))
    return status


def _list(options: argparse.Namespace, console: Console) -> int:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("lab", no_wrap=True)
    for column in ("title", "kind", "lesson"):
        table.add_column(column)
    for lab in kvref_labs.all_labs():
        table.add_row(lab.name, Text(lab.title), KINDS[lab.kind], f"docs/how/{lab.lesson}.md")
    console.print(table)
    console.print("start one: kvref lab start 1")
    return 0


def _start(options: argparse.Namespace, console: Console) -> int:
    lab = _lab_called(options.lab)
    folder = Path(options.folder or f"lab-{lab.name}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CannotRun(f"{folder} exists and is not an empty folder: name another one, as in kvref lab start {lab.number} DIR")
    write_student_folder(lab, folder)
    console.print(
        f"wrote {folder}: read README.md, edit {lab.student_file}, and run: cd {folder}; kvref lab check", soft_wrap=True
    )
    return 0


def write_student_folder(lab: Lab, folder: Path) -> None:
    """Write the files of a student: the task, the file to edit, and the adapter or the calls."""
    folder.mkdir(parents=True, exist_ok=True)
    hints = count_noun(len(lab.hints), "hint")
    readme = f"# Lab {lab.number}: {lab.title}\n\n{lab.text('task.md')}{HOW_TO.format(file=lab.student_file, hints=hints)}"
    shutil.copyfile(lab.folder / "start.py", folder / lab.student_file)
    if lab.kind == "predict":
        shutil.copyfile(lab.folder / "calls.py", folder / "calls.py")
    else:
        values = {"factory": lab.factory, "family": lab.family, "formats": lab.formats, "limits": dict(lab.limits)}
        adapter = ADAPTER_TEXT.format(name=ADAPTER, **values)
        (folder / "adapter.py").write_text(adapter, encoding="utf-8")
        readme += DEBUGGING.format(clause=lab.bug)
    (folder / "README.md").write_text(readme, encoding="utf-8")
    _write_record(folder, lab, 0)


def _check(options: argparse.Namespace, console: Console) -> int:
    folder = Path(options.folder)
    lab, _ = _read_record(folder)
    console.print(f"lab {lab.number}: {lab.title}", style="bold", highlight=False)
    solved = _check_answers(lab, folder, console) if lab.kind == "predict" else _check_cache(lab, folder, console)
    if solved:
        console.print(Text(f"solved. {_next_lab(lab)}", style="bold green"), soft_wrap=True)
    return 0 if solved else 1


def _check_cache(lab: Lab, folder: Path, console: Console) -> bool:
    run_options, holding = RunOptions(ADAPTER, Effort(examples=EXAMPLES), lab.family), 0
    with chdir(folder), closing(make_runner(run_options)) as judge:
        for clause, result in judge_lab(lab, judge):
            verdict = result["verdict"]
            if verdict == "passed":
                holding += 1
                if holding <= len(lab.clauses):
                    console.print(Text(f"  holds   {clause.id} · {clause.title}", style="green"), soft_wrap=True)
                continue
            console.print(
                Text(f"  {'broken ' if verdict == 'failed' else 'missing'} {clause.id} · {clause.title}", style="red"),
                soft_wrap=True,
            )
            console.print(Text(f"{_explain(result, run_options)}\n"), soft_wrap=True)
            number = len(lab.clauses)
            said = f"the first {holding} of {number} clauses hold; those after {clause.id} are not checked yet"
            if holding >= number:
                said = f"the checks of all {number} clauses hold, but a random sequence of calls breaks {clause.id}"
            console.print(Text(f"not solved: {said}. {_help(lab, Path())}", style="bold red"), soft_wrap=True)
            return False
    return True


def judge_lab(lab: Lab, judge: CheckRunner) -> Iterator[tuple[Clause, Result]]:
    """Yield the clauses of a lab with their results, in the order of the lab. Writes the traces of failures.

    First come the results of the written checks of each clause. Those of random sequences of calls follow, because they find
    one wrong operation by whichever clause its consequences break first.
    """
    selected = [each for id in lab.clauses for each in select_checks(id, lab.family).items()]
    for clause, checks in selected:
        yield clause, _judge_clause(judge, clause, [check for check in checks if check.run])
    for clause, checks in selected:
        for check in checks:
            if not check.run:
                yield clause, _judge_clause(judge, clause, [check])


def _judge_clause(judge: CheckRunner, clause: Clause, checks: list[Check]) -> Result:
    found = [judge.judge_check(check) for check in checks]
    outcomes = [judge.shrink_failure(each) if isinstance(each, Failure) else each for each in found]
    result = clause_result(judge, clause, checks, outcomes, None)
    for failure in shown_failures(result)[:1]:
        if saved := save_failure(
            [each for each in outcomes if each.check == failure.check["check"]], FAILURES, clause.id, judge.name
        ):
            failure.check["trace"] = str(saved[1])
    return result


def _explain(result: Result, run_options: RunOptions) -> str:
    """What is wrong: what is not written or missing, or else the shortest calls that show the failure."""
    for failure in shown_failures(result):
        if failure.check["got"].startswith("NotImplementedError"):
            return f"  not written yet: {failure.check['where']}"
        lines = failure_text(failure, run_options, ()).splitlines()[1:]  # without the heading
        return "\n".join(line for line in lines if not line.startswith(_LEFT_OUT))
    return f"  it cannot be judged, because this is missing: {', '.join(result['missing'])}"


def _check_answers(lab: Lab, folder: Path, console: Console) -> bool:
    answers = read_answers(folder / lab.student_file)
    calls, right = lab.text("calls.py"), quiz.right_answers(lab.folder / "calls.py")
    wrong = 0
    for number, expected in right.items():
        question, line = quiz.question(calls, number)
        name = f"question {number}, line {line} of calls.py"
        if answers.get(number) is None:
            console.print(Text(f"  no answer {name}: {question}", style="yellow"), soft_wrap=True)
        elif quiz.plain(answers[number]) == expected:
            console.print(Text(f"  right     {name}: {expected}", style="green"), soft_wrap=True)
        else:
            console.print(Text(f"  wrong     {name}: not {answers[number]!r}. {question}", style="red"), soft_wrap=True)
            wrong += 1
    left = sum(answers.get(number) is None for number in right)
    if wrong or left:
        said = f"not solved: {len(right) - wrong - left} of {count_noun(len(right), 'answer')} right, {wrong} wrong. "
        console.print(Text(said + _help(lab, folder), style="bold red"), soft_wrap=True)
    return not wrong and not left


def read_answers(path: Path) -> dict[int, Any]:
    """Return the answers of a student. Raises CannotRun."""
    try:
        answers = runpy.run_path(str(path)).get("answers")
    except Exception as error:
        raise CannotRun(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    if not isinstance(answers, dict):
        raise CannotRun(f"{path}: expected `answers = {{1: ..., 2: ...}}`, got {answers!r}")
    return answers


def _hint(options: argparse.Namespace, console: Console) -> int:
    folder = Path(options.folder)
    lab, shown = _read_record(folder)
    if shown == len(lab.hints):
        console.print(f"no more hints: all {shown} were shown (lab {lab.number}). {_SOLUTION}", soft_wrap=True)
        return 0
    console.print(Text(f"hint {shown + 1} of {len(lab.hints)} (lab {lab.number})", style="bold"))
    console.print(Text(lab.hints[shown]), soft_wrap=True)
    _write_record(folder, lab, shown + 1)
    return 0


def _solution(options: argparse.Namespace, console: Console) -> int:
    lab, _ = _read_record(Path(options.folder))
    print(lab.text("solution.py"), end="")  # not by rich, so that it can be written to a file
    return 0


_LEFT_OUT = ("  found by", "  model", "  derived", "  again")  # lines of a failure that a student does not need
_SOLUTION = "kvref lab solution prints a solution"


def _help(lab: Lab, folder: Path) -> str:
    """What the student can do next. folder: the student's."""
    left = len(lab.hints) - _read_record(folder)[1]
    return f"{count_noun(left, 'hint')} left: kvref lab hint" if left else _SOLUTION


def _next_lab(lab: Lab) -> str:
    following = [each for each in kvref_labs.all_labs() if each.number == lab.number + 1]
    if not following:
        return "This is the last lab"
    return f"The next is lab {following[0].number}, {following[0].title}: cd ..; kvref lab start {following[0].number}"


def _lab_called(name: str) -> Lab:
    try:
        return kvref_labs.find_lab(name)
    except KeyError:
        known = [lab.name for lab in kvref_labs.all_labs()]
        raise CannotRun(f"no lab {name!r}{suggest(name, known)} (kvref lab list)") from None


def _read_record(folder: Path) -> tuple[Lab, int]:
    """Return the lab in a student's folder, and the number of hints that were shown. Raises CannotRun."""
    path = folder / RECORD
    if not path.is_file():
        raise CannotRun(f"no lab in {folder.resolve()}: expected a folder that kvref lab start wrote")
    try:
        record = tomllib.loads(path.read_text(encoding="utf-8"))
        lab, shown = _lab_called(record["lab"]), record["hints_shown"]
    except (tomllib.TOMLDecodeError, KeyError) as error:
        raise CannotRun(f"{path}: expected the entries lab and hints_shown ({error})") from None
    return lab, min(max(int(shown), 0), len(lab.hints))


def _write_record(folder: Path, lab: Lab, shown: int) -> None:
    (folder / RECORD).write_text(f'lab = "{lab.name}"\nhints_shown = {shown}\n', encoding="utf-8")


_COMMANDS = {"list": _list, "start": _start, "check": _check, "hint": _hint, "solution": _solution}
