"""README and docs show real commands and real output."""

import doctest
import json
import re
import shlex
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
from commandline import run_kvref

import kvref

ROOT = Path(kvref.__file__).parents[1]
sys.path.insert(0, str(ROOT / "docs/_tools"))

from generate_api_subsets import SUBSETS, derived_operations_table  # noqa: E402  (docs/_tools is no package)
from generate_findings_index import FindingError, findings, read_page  # noqa: E402


def test_the_readmes_example_runs():
    failures, tried = doctest.testfile(str(ROOT / "README.md"), module_relative=False)
    assert (failures, tried > 8) == (0, True)


def fenced(page, language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / page).read_text(encoding="utf-8"), flags=re.DOTALL)


def kvref(folder, *arguments):
    return run_kvref(*arguments, folder=folder)


def test_the_ten_lines_are_judged_as_the_page_says(tmp_path):
    first, refusing, *_ = fenced("test-your-cache.md", "python")
    said, conformant, listed, *_ = fenced("test-your-cache.md", "text")
    (tmp_path / "mycache.py").write_text(first)
    done = kvref(tmp_path, "check", "mycache:MyCache")
    assert done.returncode == 1
    assert done.stdout.endswith(f"\n{said}")
    assert "max_seq_len=1," in done.stdout[done.stdout.index("CONTIG-06 ·") :].splitlines()[1]
    top, offers = listed.split("...\n")
    done = kvref(tmp_path, "check", "mycache:MyCache", "--list")
    lines = "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())
    assert lines.startswith(top)
    assert offers in lines
    (tmp_path / "mycache.py").write_text(refusing + first[first.index("\n\nclass MyCache") :])
    done = kvref(tmp_path, "check", "mycache:MyCache", "--examples", "30")
    assert (done.returncode, done.stdout.endswith(f"\n{conformant}")) == (0, True), done.stdout


def test_the_rows_quantizer_is_judged_as_the_page_says(tmp_path):
    *_, code = fenced("test-your-cache.md", "python")
    *_, said = fenced("test-your-cache.md", "text")
    (tmp_path / "myrows.py").write_text(code)
    done = kvref(tmp_path, "check", "myrows:MyRows", "--examples", "30")
    assert (done.returncode, done.stdout.endswith(f"\n{said}")) == (0, True), done.stdout


def test_what_refuses_passes_in_the_steps_for_ci(tmp_path):
    first, refusing, *_ = fenced("test-your-cache.md", "python")
    (known,) = (text for text in fenced("test-your-cache.md", "text") if "# known" in text)
    github, gitlab, _ = fenced("test-your-cache.md", "yaml")
    (tmp_path / "mycache.py").write_text(refusing + first[first.index("\n\nclass MyCache") :])
    (tmp_path / "known.txt").write_text(known)
    given = dict(re.findall(r"(implementation|arguments): (.*)", github))
    values = {
        "$IMPLEMENTATION": given["implementation"],
        '${SINCE:+--since "$SINCE"} ': "",
        "${{ inputs.arguments }}": given["arguments"],
    }
    action = (ROOT / "action.yml").read_text(encoding="utf-8")
    for name, value in values.items():
        action = action.replace(name, value)
    commands = re.findall(r"^(?:      run:)? +kvref (.*)", action, re.MULTILINE) + re.findall(r"- kvref (.*)", gitlab)
    assert len(commands) == 5
    done = [kvref(tmp_path, *shlex.split(words)) for words in commands]
    assert [each.returncode for each in done] == [0] * 5, done
    for file in ("kvref-report/badges/mycache.svg", "kvref.xml", "kvref.json", "kvref-results.xml", "kvref-results.json"):
        assert (tmp_path / file).exists(), file


def test_the_limits_the_page_shows_are_limits():
    from kvref_conformance.limits import ARGUMENTS, Limits

    (code,) = (code for code in fenced("test-your-cache.md", "python") if "class Kernels" in code)
    found = {}
    exec(code, found)
    assert str(Limits(found["Kernels"].limits).limit("paged", "head_dim")) == "64 or 128"
    (toml,) = fenced("test-your-cache.md", "toml")
    assert Limits(tomllib.loads(toml)["implementations"]["mycache"]["limits"]).limit("", "num_layers").most == 1
    page = (ROOT / "docs/test-your-cache.md").read_text(encoding="utf-8")
    assert all(f"| `{name}` |" in page for name in ARGUMENTS)


def paged_adapter():
    (code,) = (code for code in fenced("test-your-cache.md", "python") if "class PageStore" in code)
    return code


def test_the_paged_adapter_ends_as_the_page_says_and_shows_the_bug_it_names(tmp_path):
    (last_lines,) = (text for text in fenced("test-your-cache.md", "text") if "derived: paged" in text)
    (tmp_path / "mypaged.py").write_text(paged_adapter())
    done = kvref(tmp_path, "check", "mypaged:MyPaged", "--examples", "5")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert done.stdout.endswith(f"\n{last_lines}")
    (tmp_path / "leaks.py").write_text(paged_adapter().replace("self.free += pages", "self.free += pages[1:]"))
    done = kvref(tmp_path, "check", "leaks:MyPaged", "--clause", "PAGED-07")
    assert done.returncode == 1
    assert len(re.findall(r"^  (?:paged|sequence)\b", done.stdout, re.MULTILINE)) == 5


@pytest.mark.extended
def test_a_cache_of_one_size_that_says_so_is_judged_as_one_of_any(tmp_path):
    sized = paged_adapter().replace("head_dim > 256", "(head_dim, block_size) != (64, 16)")
    (tmp_path / "sized.py").write_text(sized.replace('{"most": 256}', '64, "block_size": 16'))
    done = kvref(tmp_path, "check", "sized:MyPaged", "--examples", "10")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    (last_lines,) = (text for text in fenced("test-your-cache.md", "text") if "derived: paged" in text)
    assert done.stdout.splitlines()[-1] == last_lines.splitlines()[-1]


@pytest.mark.long
def test_the_backend_of_one_kernel_at_a_time_passes(tmp_path):
    from kvref_conformance.clauses import all_clauses

    chapters = ("FMT-", "QUANT-", "ATTN-", "KERN-")  # those that depend on kernels most
    (code,) = fenced("write-a-backend.md", "python")
    (tmp_path / "mybackend.py").write_text(code)
    command = [sys.executable, "-m", "kvref_conformance.cli", "check", "mybackend:implementation", "--examples", "5"]
    command += ["--clause", ",".join(f"{chapter}*" for chapter in chapters)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    judged = sum(clause.startswith(chapters) for clause in all_clauses()) - 1  # KERN-06 takes gigabytes
    assert ["all", str(judged), "0", "0", "1"] in [line.split() for line in done.stdout.splitlines()]


def test_the_number_of_clauses_is_right():
    from kvref_conformance.clauses import all_clauses, spec

    for page, words in (("README.md", "numbered clauses"), ("CHANGELOG.md", f"clauses in {len(spec())} chapters")):
        (number,) = re.findall(rf"(\d+) {words}", (ROOT / page).read_text(encoding="utf-8"))
        assert int(number) == len(all_clauses())


def test_the_number_of_vectors_is_right():
    (number,) = re.findall(r"(\d+) call traces", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert int(number) == len(json.loads((ROOT / "conformance/vectors/manifest.json").read_text())["traces"])


def test_links_lead_somewhere():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs/how").glob("*.md")]
    for page in [*pages, *(ROOT / "conformance/adapters").rglob("findings.md")]:
        prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\((?!http)([^)#]+)", prose):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_clause_named_in_the_code_exists():
    from kvref_conformance.clauses import all_clauses

    known = set(all_clauses())
    for folder in ("kvref", "backends", "conformance/kvref_conformance", "conformance/adapters", "docs"):
        for page in [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.md")]:
            named = re.findall(
                r"\b(?:LAW|FMT-[A-Z0-9]+|CONTIG|BLOCK|PAGED|QUANT|TIER|BUF|POOL|ATTN|KERN)-\d\d\b", page.read_text("utf-8")
            )
            assert set(named) <= known, f"{page.name} names {sorted(set(named) - known)}"


def test_the_number_of_the_zoo_is_right():
    import kvref_zoo

    (number,) = re.findall(r"(\d+) caches with a planted bug", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert int(number) == len(kvref_zoo.names())


def test_the_failure_the_readme_shows_is_what_the_command_prints(tmp_path):
    done = kvref(tmp_path, "check", "zoo:paged-leaks-a-block", "--clause", "PAGED-07")
    assert (done.returncode, done.stderr) == (1, "failed: PAGED-07 · `drop` frees every block of the sequence\n")
    for page in ("README.md", "docs/index.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        assert "kvref check zoo:paged-leaks-a-block --clause PAGED-07\n" in text
        (shown,) = re.findall(r"```text\n(PAGED-07 .*?)```", text, flags=re.DOTALL)
        failure, verdict = shown.split("...\n")
        assert done.stdout.startswith(f"{failure}\n")
        assert done.stdout.endswith(f"\n{verdict}")


def test_the_api_subsets_consist_of_existing_operations():
    from kvref_conformance.calls.operation_table import operations

    for family, subsets in SUBSETS.items():
        assert {name for words in subsets for name in words.split()} <= set(operations(family))
    assert "| `paged.gather` | `length`, `read` | PAGED-12 |" in derived_operations_table()


def test_every_failure_of_others_is_decided():
    """Each clause that a third-party implementation fails in the results has a finding that names both."""
    told = {(of, clause) for each in findings() for of in each.of for clause in each.clauses}
    for path in (ROOT / "docs/results/checks").glob("*.json"):
        document = json.loads(path.read_text(encoding="utf-8"))
        name = document["implementation"]["name"]
        broken = {(name, clause["clause"]) for clause in document["clauses"] if clause["verdict"] == "failed"}
        assert broken <= told, path.name


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("*Breaks* WIN-01 · *of* `a` · *costs* wrong tokens", "expected [*]Breaks[*]"),
        ("*Breaks* WIN-1 · *of* `a` · *costs* wrong tokens · *right*: either", "no such clause: WIN-1"),
        ("*Breaks* WIN-01 · *of* `a` · *costs* little · *right*: either", "expected a cost of another's tokens"),
        ("*Breaks* no clause · *of* `a` · *costs* nothing · *right*: either · [script](x.py)", "no such script: x.py"),
    ],
)
def test_a_finding_that_is_not_written_as_it_has_to_be_is_refused(tmp_path, line, message):
    (tmp_path / "page.md").write_text(f"# Project 1.0\n\n## A finding\n\n{line}\n\nText.\n", encoding="utf-8")
    with pytest.raises(FindingError, match=message):
        list(read_page(tmp_path / "page.md"))


@pytest.mark.parametrize(
    "path",
    [*sorted((ROOT / "docs").glob("**/[!_]*.md")), *sorted((ROOT / "conformance/adapters").rglob("findings.md"))],
    ids=lambda path: f"{path.parent.name}/{path.stem}",
)
def test_headings_go_down_one_level_at_a_time(path):
    """Sphinx warns about skipped heading levels, and its warnings are errors; this test finds them sooner."""
    prose = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    levels = [len(marks) for marks in re.findall(r"^(#+) ", prose, flags=re.MULTILINE)]
    assert levels[:1] == [1] and all(below <= above + 1 for above, below in pairwise(levels)), levels


def test_the_readme_counts_third_party_implementations():
    judged = [json.loads(path.read_text())["implementation"] for path in (ROOT / "docs/results/checks").glob("*.json")]
    projects = [each["project"] for each in judged if each.get("project", "kvref") != "kvref"]
    kinds = "third-party caches, allocators, casts, attention kernels and engines"
    said = f"{len(projects)} {kinds} from {len(set(projects))} projects"
    assert said in " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
