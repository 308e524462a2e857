"""The table at the end of `nox`: results of this run, and of earlier runs."""

import ast
import importlib.util
import itertools
import json
import tarfile
import zipfile
from pathlib import Path

import pytest
from test_docs import ROOT
from test_report import document

pytest.importorskip("nox")
from nox.command import CommandFailed


def loaded(monkeypatch):
    """Load noxfile.py as a separate process would, without the slow search for Python interpreters."""
    monkeypatch.setattr("nox.registry._REGISTRY", {})
    monkeypatch.setattr("shutil.which", lambda name: None)
    spec = importlib.util.spec_from_file_location("noxfile_under_test", ROOT / "noxfile.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def noxfile(monkeypatch, tmp_path):
    """The sessions as a separate run in an empty folder."""
    monkeypatch.setenv("KVREF_NOX_RUN", "")  # restored when the test ends, whatever the file sets
    monkeypatch.delenv("KVREF_NOX_RUN")
    monkeypatch.chdir(tmp_path)
    return loaded(monkeypatch)


class Skipped(Exception):
    """Replaces nox's own exception, which is private."""


class Session:
    """The part of nox's session that a check needs: it writes the results that the command would write."""

    def __init__(self, results, status=0, installs=True):
        self.results, self.status, self.installs = results, status, installs
        self._env, self.commands = {}, []

    @property
    def env(self):  # read only, like nox's
        return self._env

    def install(self, *packages):
        if not self.installs:
            raise CommandFailed("pip")

    def skip(self, why):
        raise Skipped(why)

    def create_tmp(self):
        return "tmp"

    def run(self, *command, success_codes=(0,), **options):
        self.commands.append(command)
        if self.results is not None and "--json" in command:
            (path,) = [value for option, value in itertools.pairwise(command) if option == "--json"]
            Path(path).write_text(json.dumps(self.results))
            for trace in filter(None, (clause["trace"] for clause in self.results["clauses"])):
                Path(trace).parent.mkdir(parents=True, exist_ok=True)
                Path(trace).touch()
        if self.status not in success_codes:
            raise RuntimeError("the command failed")


def table(noxfile, run=None, now=None):
    notes = [json.loads(path.read_text()) for path in noxfile.RESULTS.glob("*.note")]
    return noxfile.table_of(notes, run or noxfile.RUN, now or notes[0]["made"])


def test_a_check_leaves_what_it_found(noxfile):
    noxfile._check(Session(document()), "numpy", "Python 3.11", "strict")
    noxfile._check(Session(document(), status=1), "their:cache", "theirs", "CPU", success_codes=(0, 1))
    assert [line.split() for line in table(noxfile)] == [
        ["implementation", "passed", "failed", "judged"],
        ["Python", "3.11", "strict", "numpy", "6", "1", "7", "of", "7"],
        ["theirs", "CPU", "their:cache", "6", "1", "7", "of", "7"],
    ]


def test_what_is_not_judged_is_said(noxfile):
    little = document(broken=()) | {"conclusion": {"verdict": "not judged", "judged": 7, "of": 30, "least": 50}}
    noxfile._check(Session(little), "numpy", "Python 3.11", "")
    assert table(noxfile)[-1].endswith("7       0   7 of 30: not judged")


def test_what_an_earlier_run_found_is_not_shown_as_this_ones(noxfile):
    noxfile._check(Session(document()), "numpy", "Python 3.11", "strict")
    (note,) = noxfile.RESULTS.glob("*.note")
    made = json.loads(note.read_text())["made"]
    heading, apart, line = table(noxfile, "another run", made + 2 * 86400 + 5)
    assert heading.endswith("judged")
    assert apart == "results of earlier runs:"
    assert line.endswith("6       1   7 of 7   2 days ago")
    assert table(noxfile, "another run", made + 3600)[-1].endswith("1 hour ago")
    assert table(noxfile, "another run", made)[-1].endswith("less than a minute ago")


def test_a_check_that_does_not_finish_takes_the_older_result_away(noxfile):
    noxfile._check(Session(document()), "numpy", "Python 3.11", "strict")
    with pytest.raises(RuntimeError):
        noxfile._check(Session(None, status=2), "numpy", "Python 3.11", "strict")
    assert table(noxfile)[-1].endswith("it did not finish")


def test_every_check_of_the_sessions_leaves_a_note():
    """All sessions call `kvref check` through the one function that records its results."""
    text = (ROOT / "noxfile.py").read_text()
    assert text.count('"kvref", "check"') == 1
    assert text.count("_check(session, ") >= 4


def test_sessions_in_processes_of_their_own_are_of_the_same_run(noxfile, monkeypatch):
    assert loaded(monkeypatch).RUN == noxfile.RUN  # nox -j starts it with the same environment
    monkeypatch.delenv("KVREF_NOX_RUN")
    assert loaded(monkeypatch).RUN != noxfile.RUN


def test_what_does_not_install_is_said_and_left_out(noxfile):
    with pytest.raises(Skipped, match="mlx_lm cannot be installed"):
        noxfile.others(Session(None, installs=False), "mlx_lm")
    assert [line.split()[2:] for line in table(noxfile)[1:]] == [
        [name, "cannot", "be", "installed"] for name in sorted(noxfile.others_of("mlx_lm"))
    ]


@pytest.fixture
def results(tmp_path):
    (tmp_path / "docs/results/checks").mkdir(parents=True)
    return tmp_path / "docs/results"


def test_the_results_of_others_lie_where_the_site_reads_them(noxfile, results, tmp_path):
    session = Session(document(), status=1)
    noxfile.others(session, "mlx_lm")
    assert {path.stem for path in (results / "checks").iterdir()} == set(noxfile.others_of("mlx_lm"))
    assert session.env == {"HF_HUB_OFFLINE": "1", "HOME": str(tmp_path / "tmp")}


def test_others_are_told_by_what_changed_since_they_were_judged_last(noxfile, results):
    session = Session(document())
    (results / "checks/mlx-lm.json").write_text("{}")
    noxfile.others(session, "mlx_lm")
    (said,) = [command for command in session.commands if command[1] == "report"]
    assert said == ("kvref", "report", ".nox/results/mlx-lm-others-mlx_lm.json", "--since", "docs/results/checks/mlx-lm.json")


def test_stale_results_are_renewed_project_by_project_and_own_ones_at_once(noxfile, results):
    names, notified = ("litgpt-kv", "litgpt", "numpy", "harness-cpp"), []

    class Listing(Session):
        def run(self, *command, **options):
            super().run(*command)
            listed = [f"docs/results/checks/{name}.json: {name} 1, judged on 2026-01-01\n  LAW-21: it is new\n" for name in names]
            return "".join(listed) if "--stale" in command else None

        def notify(self, session):
            notified.append(session)

    written = document()
    written["implementation"]["project"] = "mine"
    session = Listing(written)
    noxfile.renew(session)
    assert notified == ["others(project='litgpt')"]
    checked = [command[2] for command in session.commands if command[:2] == ("kvref", "check")]
    assert checked == ["exec:.nox/harnesses/cpp/harness", "numpy"]
    assert ("cmake", "--build", ".nox/harnesses/cpp") in session.commands
    published = {path.stem: json.loads(path.read_text()) for path in (results / "checks").iterdir()}
    assert {name: each["implementation"]["project"] for name, each in published.items()} == {
        "harness-cpp": "kvref",
        "numpy": "kvref",
    }


def test_what_cannot_run_leaves_the_others_of_its_project_to_be_judged(noxfile, results):
    noxfile.others(Session(None, status=2), "mlx_lm")
    assert list((results / "checks").iterdir()) == []
    assert {line.split()[-4:][0] for line in table(noxfile)[1:]} == {"it"}  # it did not finish


def test_what_may_end_its_process_has_one_of_its_own(noxfile, results):
    session = Session(document())
    noxfile.others(session, "onnxruntime")
    apart = {command[2] for command in session.commands if "--isolate" in command}
    assert apart == {"onnxruntime-multi-head"} and apart <= set(noxfile.ISOLATED)


def test_a_large_trace_is_published_without_its_arrays(noxfile):
    array = {"dtype": "float32", "shape": [2, 30_000], "base64": "AAAA" * 80_000}
    failed = {"what": "paged.gather", "expected": "1.0", "got": "0.0"}
    header = {"trace": 1, "clause": "LAW-18", "check": "a check (paged)", "judge": "model", "seed": 3, "failed": failed}
    calls = [
        {"id": 1, "op": "paged.write", "on": 0, "args": {"start": 0, "keys": array}}, {"id": 1, "none": True, "clause": "LAW-18"},
        {"id": 2, "op": "paged.gather", "on": 0, "args": {}},
        {"id": 2, "ok": [array, array], "clause": "LAW-18", "within": array, "got": {"ok": [array]}},
    ]  # fmt: skip
    text = "".join(f"{json.dumps(line)}\n" for line in [header, *calls])
    cut = [json.loads(line) for line in noxfile.without_arrays(text).splitlines()]
    assert cut == [
        header | {"judge": "check"},
        {"id": 1, "op": "paged.write", "on": 0, "args": {"start": 0, "keys": "float32[2, 30000]"}}, {"id": 1, "none": True},
        {"id": 2, "op": "paged.gather", "on": 0, "args": {}}, {"id": 2, "ok": ["float32[2, 30000]"], "failed": failed},
    ]  # fmt: skip
    small = f"{json.dumps(header)}\n"
    assert noxfile.without_arrays(small) == small


def test_traces_are_published_with_the_results_and_older_ones_go(noxfile, results, tmp_path):
    broken, mended = document()["clauses"][:2]
    traces, published = tmp_path / ".kvref/failures", results / ".kvref/failures"
    for folder in (traces, published):
        folder.mkdir(parents=True)
    (published / f"{mended['clause']}-litgpt.jsonl").write_text("older")
    (published / f"{mended['clause']}-litgpt-window.jsonl").write_text("another's")
    (traces / "a.jsonl").write_text("newer")
    said = document() | {"clauses": [broken | {"trace": ".kvref/failures/a.jsonl"}, mended | {"trace": None}]}
    (tmp_path / "litgpt.json").write_text(json.dumps(said))
    noxfile._publish("litgpt", tmp_path / "litgpt.json")
    assert {path.name: path.read_text() for path in published.iterdir()} == {
        "a.jsonl": "newer", f"{mended['clause']}-litgpt-window.jsonl": "another's",
    }  # fmt: skip


def test_what_npm_installs_lies_where_node_looks(noxfile, results, tmp_path):
    session = Session(document())
    noxfile.others(session, "transformers_js")
    first, *checks = session.commands
    assert first[0] == "npm" and f"npm install {first[-1]}" in noxfile.OTHERS["transformers_js"]
    assert {command[0] for command in checks} == {"kvref"}
    assert session.env["NODE_PATH"] == str(tmp_path / "tmp/node_modules")


def test_what_others_wrote_is_judged_by_a_session(noxfile):
    """Every adapter is in the folder of a project; every folder has adapters, findings and commands that install the project."""
    known = noxfile.ENTRIES["kvref.implementations"]
    assert sorted(known) == sorted(name for project in noxfile.OTHERS for name in noxfile.others_of(project))
    folders = {path.name for path in (ROOT / "conformance/adapters/kvref_adapters").glob("[!_]*/")}
    assert folders == set(noxfile.OTHERS)
    for project, commands in noxfile.OTHERS.items():
        assert noxfile.others_of(project)
        assert (ROOT / "conformance/adapters/kvref_adapters" / project / "findings.md").exists()
        assert all(command.startswith(("pip install ", "npm install ")) for command in commands)


def test_every_entry_point_of_the_adapters_leads_to_a_class(noxfile):
    """Read from the source, because most projects are not installed."""
    for name, where in noxfile.ENTRIES["kvref.implementations"].items():
        module, _, found = where.partition(":")
        text = (ROOT / "conformance/adapters" / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
        assert found in [node.name for node in ast.parse(text).body if isinstance(node, ast.ClassDef)], name


def wheel_of(path, *names, size=1):
    packages = ("kvref_adapters/__init__.py", "kvref_adapters-0.1.0.dist-info/METADATA")
    with zipfile.ZipFile(path / "kvref_adapters-0.1.0-py3-none-any.whl", "w") as archive:
        for name in (*packages, *names):
            archive.writestr(name, b"x" * size)
    return path / "kvref_adapters-0.1.0-py3-none-any.whl"


def test_a_wheel_of_sources_alone_has_no_problem(noxfile, tmp_path):
    assert list(noxfile.distribution_problems(wheel_of(tmp_path, "kvref_adapters/mlx/adapter.py"))) == []


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("kvref_adapters/test_it.py", "is a test of kvref itself"),
        ("kvref_adapters/tests/helper.py", "is a test of kvref itself"),
        ("kvref_adapters/__pycache__/it.pyc", "is not a source file"),
        ("stray/__init__.py", "expected the packages ['kvref_adapters'], got ['kvref_adapters', 'stray']"),
    ],
)
def test_a_stray_file_of_a_wheel_is_named(noxfile, tmp_path, name, problem):
    (found,) = noxfile.distribution_problems(wheel_of(tmp_path, name))
    assert problem in found


def test_a_large_file_of_a_distribution_is_named(noxfile, tmp_path, monkeypatch):
    monkeypatch.setattr(noxfile, "LARGEST_FILE", 10)
    assert len(list(noxfile.distribution_problems(wheel_of(tmp_path, size=11)))) == 2


def test_an_sdist_without_its_build_file_is_named(noxfile, tmp_path):
    (tmp_path / "x.py").write_text("")
    with tarfile.open(tmp_path / "kvref-1.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "x.py", "kvref-1/x.py")
    assert list(noxfile.distribution_problems(tmp_path / "kvref-1.tar.gz")) == ["kvref-1.tar.gz: no pyproject.toml"]
