"""The labs: each solution solves its lab, each start breaks the clause that it is meant to break, and `kvref lab` says so."""

import ast
import difflib
import re
import runpy
from pathlib import Path

import pytest
from commandline import run_kvref

import kvref_labs
from kvref_conformance.commands.lab import KINDS, judge_lab, read_answers, write_student_folder
from kvref_conformance.implementations import validate_implementation
from kvref_conformance.runner.check_runner import CheckRunner
from kvref_conformance.runner.options import Effort
from kvref_labs import quiz
from kvref_labs.adapter import Adapter

LABS = kvref_labs.all_labs()
CACHES = [lab for lab in LABS if lab.kind != "predict"]
QUIZZES = [lab for lab in LABS if lab.kind == "predict"]
LESSONS = Path(__file__).parents[2] / "docs/how"

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # a bug can divide by zero


def named(labs):
    return pytest.mark.parametrize("lab", labs, ids=[lab.name for lab in labs])


def verdicts(lab, file):
    """The verdict of each clause of a lab, for the student's class in a file of the lab's folder."""
    student = runpy.run_path(str(lab.folder / file))[lab.factory]
    adapter = validate_implementation(lab.name, Adapter(lab.family, student, lab.formats, lab.limits))
    judge = CheckRunner(adapter, Effort(examples=20, timeout=2.0, shrinks=False), lab.name)
    found = {}
    for clause, result in judge_lab(lab, judge):
        found[clause.id] = result["verdict"]
        if result["verdict"] != "passed":
            break
    return found


@named(CACHES)
def test_the_solution_satisfies_every_clause(lab, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert verdicts(lab, "solution.py") == dict.fromkeys(lab.clauses, "passed")


@named(CACHES)
def test_the_start_breaks_the_intended_clause_first(lab, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    *before, (clause, verdict) = verdicts(lab, "start.py").items()
    assert {verdict for _, verdict in before} <= {"passed"}
    assert (clause, verdict) == (lab.bug, "failed")


@named([lab for lab in CACHES if lab.kind == "fix"])
def test_a_fix_changes_a_few_lines(lab):
    lines = difflib.ndiff(*(lab.text(name).splitlines() for name in ("start.py", "solution.py")))
    assert 0 < sum(line.startswith("+ ") for line in lines) <= 10


@named(QUIZZES)
def test_the_answers_of_the_solution_are_those_of_the_reference(lab):
    right, answers = quiz.right_answers(lab.folder / "calls.py"), read_answers(lab.folder / "solution.py")
    assert {number: quiz.plain(answer) for number, answer in answers.items()} == right
    assert read_answers(lab.folder / "start.py") == dict.fromkeys(right)
    assert list(right) == list(range(1, len(right) + 1))
    for number in right:
        assert quiz.question(lab.text("calls.py"), number)[0]


@named(CACHES)
def test_a_student_imports_nothing_from_kvref_but_errors(lab):
    for name in ("start.py", "solution.py"):
        nodes = list(ast.walk(ast.parse(lab.text(name))))
        imported = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        imported |= {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        assert imported <= {"numpy", "kvref.errors", "hashlib", "types", "collections"}


@named(LABS)
def test_its_texts_are_in_order(lab):
    task = lab.text("task.md")
    assert f"docs/how/{lab.lesson}.md" in task
    assert (LESSONS / f"{lab.lesson}.md").is_file()
    assert len(lab.hints) >= 2
    assert all(len(hint) > 40 for hint in lab.hints)
    assert {lab.bug} <= {*lab.clauses, ""}
    if lab.kind == "write":
        ranges = {end for pair in re.findall(r"[A-Z0-9-]+-\d\d to [A-Z0-9-]+-\d\d", task) for end in pair.split(" to ")}
        unnamed = set(lab.clauses) - set(re.findall(r"[A-Z][A-Z0-9-]*-\d\d", task))
        assert len(unnamed) <= 3 * (len(ranges) // 2) + 1


def test_the_numbers_count_up_and_every_lesson_has_a_lab():
    assert [lab.number for lab in LABS] == list(range(1, len(LABS) + 1))
    assert {lab.lesson for lab in LABS} >= {path.stem for path in LESSONS.glob("*.md")} - {"index"}
    assert {lab.kind for lab in LABS} == {"write", "fix", "predict"}


@pytest.fixture
def lab_command(tmp_path):
    """Run `kvref lab` in an empty folder and check its exit status; the result is what it prints, with the errors at the end."""

    def run(*arguments, status=0):
        done = run_kvref("lab", *arguments, folder=tmp_path)
        assert done.returncode == status, done.stderr
        return done.stdout + done.stderr

    return run


def test_a_student_works_on_a_cache(tmp_path, lab_command):
    cache = tmp_path / "mine/cache.py"
    lab_command("start", "4", "mine")
    assert "is not an empty folder" in lab_command("start", "4", "mine", status=2)
    said = lab_command("check", "mine", status=1)
    assert "broken  CONTIG-06" in said
    assert "got      21" in said
    assert "not solved: the first 5 of 7 clauses hold; those after CONTIG-06 are not checked yet" in said
    cache.write_text(lab_command("solution", "mine"))
    assert "solved. The next is lab 5," in lab_command("check", "mine")
    cache.write_text("class Cache\n")
    assert "SyntaxError" in lab_command("check", "mine", status=2)


def test_a_wrong_operation_is_reported_by_the_clause_about_it(tmp_path, lab_command):
    lab_command("start", "5", "mine")
    cache, solution = tmp_path / "mine/cache.py", lab_command("solution", "mine")
    cache.write_text(solution.replace("if count > self.num_free:", "if not self.num_free:"))
    said = lab_command("check", "mine", status=1)
    assert "broken  BLOCK-07" in said  # random sequences of calls would show it by BLOCK-02, the second of the lab
    cache.write_text(solution.replace("self.counts[block] += 1", "self.counts[block] = min(self.counts[block] + 1, 4)"))
    said = lab_command("check", "mine", status=1)
    assert "the checks of all 10 clauses hold, but a random sequence of calls breaks SHARE-01" in said
    assert "3 hints left: kvref lab hint" in said
    lab_command("hint", "mine")
    assert "2 hints left: kvref lab hint" in lab_command("check", "mine", status=1)


def test_a_student_answers_questions(tmp_path, lab_command):
    lab, answers = QUIZZES[0], tmp_path / "answers.py"
    write_student_folder(lab, tmp_path)
    assert "no answer" in lab_command("check", status=1)
    answers.write_text(lab.text("solution.py").replace("2 * 32 * 8 * 128 * 2", "32 * 8 * 128 * 2"))
    said = lab_command("check", status=1)
    assert "wrong     question 1" in said
    assert "not 65536. A model with 32 layers" in said
    assert "131072" not in said.splitlines()[1]
    answers.write_text(lab.text("solution.py"))
    lab_command("check")
    answers.write_text("answers = [1]")
    assert "expected `answers = {1: ..., 2: ...}`" in lab_command("check", status=2)


def test_hints_are_shown_one_after_the_other(tmp_path, lab_command):
    lab = CACHES[0]
    write_student_folder(lab, tmp_path)
    for hint in lab.hints:
        assert hint in lab_command("hint")
    assert "no more hints" in lab_command("hint")


def test_a_folder_without_a_lab_is_said_to_have_none(lab_command):
    assert "no lab in" in lab_command("check", status=2)
    assert "no lab '99'" in lab_command("start", "99", status=2)
    said = lab_command("list")
    assert all(lab.name in said for lab in LABS)


# The course


def order_of_lessons():
    listed = re.search(
        r"caption: How a KV cache works\n\n(.*?)```", (LESSONS.parent / "index.md").read_text(encoding="utf-8"), re.DOTALL
    )
    return re.findall(r"^how/(\w+)$", listed[1], re.MULTILINE)


def lesson_text(lesson):
    return (LESSONS / f"{lesson}.md").read_text(encoding="utf-8")


def test_the_index_lists_every_lesson_and_lab_in_order():
    rows = re.findall(r"^\| \[(.*?)\]\((\w+)\.md\) \| (.*?) \| (.*?) \|$", lesson_text("index"), re.MULTILINE)
    lessons = order_of_lessons()
    assert [lesson for _, lesson, _, _ in rows] == lessons
    assert set(lessons) == {path.stem for path in LESSONS.glob("*.md")} - {"index"}
    for title, lesson, builds_on, labs in rows:
        assert f"\n# {title}\n" in f"\n{lesson_text(lesson)}"
        assert set(re.findall(r"\((\w+)\.md\)", builds_on)) <= set(lessons[: lessons.index(lesson)])
        assert labs == "; ".join(f"{lab.number}: {lab.title}" for lab in LABS if lab.lesson == lesson)


def test_labs_are_in_the_order_of_the_lessons():
    numbers = [order_of_lessons().index(lab.lesson) for lab in LABS]
    assert numbers == sorted(numbers)


@pytest.mark.parametrize("lesson", order_of_lessons())
def test_a_lesson_needs_only_earlier_ones_and_ends_with_its_labs(lesson):
    text, lessons = lesson_text(lesson), order_of_lessons()
    needed = re.search(r"You\s+need\s+to\s+know\s(.*?)\n\n", text, re.DOTALL)[1]
    assert set(re.findall(r"\((\w+)\.md\)", needed)) <= set(lessons[: lessons.index(lesson)])
    ends = [
        f"*Lab {lab.number}:* {lab.title} ({KINDS[lab.kind]}); `kvref lab start {lab.number}`."
        for lab in LABS
        if lab.lesson == lesson
    ]
    assert text.endswith(f"## Lab{'s' if len(ends) > 1 else ''}\n\n" + "\n\n".join(ends) + "\n")


def run_cells(lesson, capsys):
    """Run the code cells of a lesson. Return their names and what they print."""
    found = {}
    for code in re.findall(r"```\{code-cell\} ipython3\n(.*?)```", lesson_text(lesson), re.DOTALL):
        exec(code, found)
    return found, capsys.readouterr().out


def test_the_arithmetic_of_the_lesson_about_memory(capsys):
    found, said = run_cells("memory", capsys)
    size, models = found["cache_bytes"], found["MODELS"]
    assert size(models["Llama 3.1 70B"], 1) == 2 * 80 * 8 * 128 * 2 == 320 * 1024
    assert size(models["DeepSeek-V3"], 1) == 61 * 576 * 2
    assert size(models["gpt-oss-120b"], 10**6) - size(models["gpt-oss-120b"], 10**6 - 1) == 18 * 2 * 8 * 64 * 2
    assert [sum(layers.count for layers in each) for each in models.values()] == [80, 62, 36, 61, 48]
    assert "131072 tokens each: 12 sequences" in said
    assert "from 295 operations per byte on" in said


def test_the_scheduler_of_the_lesson_changes_no_token(capsys):
    found, said = run_cells("scheduler", capsys)
    assert "the same tokens: [True, True, True, True, True]" in said
    assert "the same tokens: False" not in said
    assert re.search(r"32 steps, [1-9]\d* preemptions, 16 blocks free at the end", said)
    with pytest.raises(found["OutOfBlocks"]):
        found["serve"]([found["Request"]([1] * 70, 1)], num_blocks=16, budget=8)
