"""Sessions: tests, lint, types, and the matrix: every clause on each Python and array library that is here. `nox -l` lists them.

`nox` alone runs what this machine can, and ends with the matrix as a table: what passed where, what was left out and why.
"""

import json
import os
import platform
import shutil
import subprocess
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nox

nox.options.default_venv_backend = "uv|venv"
WITH_PIP = "venv"  # where torch is installed: pip's own configuration may say which build of it, and uv does not read that
# Sessions that keep one core busy, and write where no other does, say allow_parallel: `nox -j auto` runs those side by side.
nox.options.sessions = ["tests", "extended", "lint", "types", "matrix", "theirs", "harnesses", "docs", "browser", "gpu", "table"]

PYTHONS = ("3.11", "3.12", "3.13")


def _pythons() -> list[str]:
    """Those of PYTHONS that answer here. Where pyenv has them, all of them are put within reach."""
    if shutil.which("pyenv"):
        known = subprocess.run(["pyenv", "versions", "--bare"], capture_output=True, text=True, check=False).stdout.split()
        wanted = [version for version in known if version.rpartition(".")[0] in PYTHONS]
        os.environ.setdefault("PYENV_VERSION", ":".join(sorted(wanted, key=lambda version: version != platform.python_version())))
    here = {python: shutil.which(f"python{python}") for python in PYTHONS}
    return [python for python, path in here.items() if path and not subprocess.run([path, "-V"], capture_output=True).returncode]


HERE = _pythons()
PINNED = ("-c", "constraints.txt")
OLDEST_NUMPY = "2.1.0"  # the lower bound in pyproject.toml
# What is judged with each library. The reference on NumPy has the most to say of a Python or a NumPy; strict is slow.
JUDGED = {"numpy": ("reference", "numpy"), "numpy-oldest": ("reference", "numpy"), "strict": ("reference:strict",)}
# For all but the first: what differs on the others is not found by more sequences. They draw other numbers, all the same.
OTHERWISE = ("--examples", "10", "--seed", "1")
MUTATED = (
    "formats", "blocks", "buffers", "contiguous", "paged", "prefix", "rotary", "quantized", "tiered", "pooled", "rows",
    "attention", "inputs", "sequences", "windowed", "grouped", "latent", "channels", "sharded",
)  # fmt: skip
PROJECT = tomllib.loads((Path(__file__).parent / "pyproject.toml").read_text())
OTHERS = PROJECT["tool"]["kvref"]["others"]
LARGEST_TRACE = 200_000  # characters of a trace in docs/results
ISOLATED = ("onnxruntime-multi-head",)  # what may end the process that it runs in
NPM = {"transformers.js": "@huggingface/transformers@4.3.1"}  # what npm installs for some
AXE = "axe-core@4.14.1"
BROWSED = [f"conformance/tests/test_{name}.py" for name in ("report_pages", "site", "player", "player_answers", "player_files")]
GPU = ("cupy", "reference:cupy", "torch:cuda", "torch-compiled:cuda")
RESULTS = Path(".nox/results")  # what the sessions leave for the table
# This run. With -j each session is a process of its own, which inherits it.
RUN = os.environ.setdefault("KVREF_NOX_RUN", f"{time.time()}-{os.getpid()}")


@nox.session
def tests(session: nox.Session) -> None:
    """The tests, as the README runs them: NumPy and strict."""
    session.install(*PINNED, "-e", ".[dev]")
    session.run("pytest", *session.posargs)


@nox.session
def extended(session: nox.Session) -> None:
    """The tests that take longest, which the README's command leaves to CI."""
    session.install(*PINNED, "-e", ".[dev]")
    session.run("pytest", "-m", "extended and not torch and not long", "--dist", "worksteal", *session.posargs)


@nox.session
def long(session: nox.Session) -> None:
    """The tests of whole products, of which the others cover a part. By hand, if checks or state machines changed."""
    session.install(*PINNED, "-e", ".[dev]")
    session.run("pytest", "-m", "long", *session.posargs)


@nox.session(allow_parallel=True)
def lint(session: nox.Session) -> None:
    session.install(*PINNED, "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session(allow_parallel=True)
def types(session: nox.Session) -> None:
    session.install(*PINNED, "-e", ".[dev]")
    session.run("mypy")


# The newest NumPy on each Python; the oldest supported one on the oldest Python, and array-api-strict on the newest.
ENDS = {"numpy": HERE, "numpy-oldest": HERE[:1], "strict": HERE[-1:]}


@nox.session(allow_parallel=True)
@nox.parametrize("python,library", [(python, library) for library in JUDGED for python in ENDS[library]])
def matrix(session: nox.Session, library: str) -> None:
    """`kvref check` of the reference and of NumPy, on each Python that is here, the oldest NumPy and array-api-strict."""
    pinned = PINNED
    if library == "numpy-oldest":
        others = [line for line in Path("constraints.txt").read_text().splitlines() if not line.startswith("numpy==")]
        constraints = Path(session.create_tmp()) / "constraints.txt"
        constraints.write_text("\n".join([*others, f"numpy=={OLDEST_NUMPY}", ""]))
        pinned = ("-c", str(constraints))
    session.install(*pinned, ".[conformance]", *(["array-api-strict"] if library == "strict" else []))
    names, at = JUDGED[library], HERE.index(session.python)
    if library == "numpy" and at:  # each further Python judges one of the two: only the Python differs
        names = (names[at % len(names)],)
    for name in names:
        whole = library == "numpy" and name == "reference" and not at  # `kvref check numpy` judges the other, whole
        _check(session, name, f"Python {session.python}", library, () if whole else OTHERWISE)


@nox.session(venv_backend=WITH_PIP)
def theirs(session: nox.Session) -> None:
    """What needs torch or llama.cpp: the tests, which judge what others wrote too, torch's backend and the reference on it."""
    session.install(*PINNED, "torch")  # first and by its exact pin: anything looser may bring gigabytes of CUDA
    session.install(*PINNED, "-e", ".[dev]", "transformers", "xllamacpp", "psutil")
    session.run("pytest", "-m", "torch or llama", *session.posargs)
    for name in ("torch", "reference:torch"):
        _check(session, name, "torch", "CPU", (*OTHERWISE, "--jobs", "2"))


@nox.session
def jax(session: nox.Session) -> None:
    """The reference on a library whose arrays are immutable. By hand: each new shape is compiled, half an hour in all."""
    session.install(*PINNED, "-e", ".[dev]", "jax")
    session.run("pytest", "-m", "jax", *session.posargs)
    _check(session, "reference:jax", "jax", "CPU", ("--timeout", "300"), success_codes=(0, 1))


@nox.session(allow_parallel=True)
def harnesses(session: nox.Session) -> None:
    """The harnesses in C++, Rust and JavaScript, built and judged where their toolchains are; -rs says which are not here."""
    session.install(*PINNED, "-e", ".[dev]")
    session.run("pytest", "-n", "0", "-rs", "-m", "harness", "conformance/tests/test_harnesses.py", *session.posargs)


@nox.session(allow_parallel=True)
def docs(session: nox.Session) -> None:
    """The site, into docs/_build/html: warnings are errors."""
    session.install(*PINNED, "-e", ".[docs]")
    session.run("python", "docs/generated_parts.py")
    session.run(
        "sphinx-build", "-W", "-E", "--keep-going", "-q", "-d", "docs/_build/doctrees", "-b", "html", "docs", "docs/_build/html"
    )


@nox.session(requires=["docs"])
def browser(session: nox.Session) -> None:
    """The report and the site in headless Chromium, which has to be here (apt install chromium)."""
    if not (os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")):
        session.skip("no chromium here")
    session.install(*PINNED, "-e", ".[dev]", "playwright")
    if shutil.which("npm"):  # the accessibility checks, which the tests skip where it is not
        folder = Path(session.create_tmp())
        session.run("npm", "install", "--silent", "--no-audit", "--prefix", str(folder), AXE, external=True)
        session.env["AXE"] = str(folder / "node_modules/axe-core/axe.min.js")
    session.run("pytest", "-rs", "-m", "browser", *BROWSED, *session.posargs)


@nox.session(venv_backend=WITH_PIP, reuse_venv=True)
@nox.parametrize("project", list(OTHERS))
def others(session: nox.Session, project: str) -> None:
    """What other people wrote, a project an environment: the results go to docs/results, to be committed. By hand: gigabytes."""
    names = others_of(project)
    try:
        for packages in OTHERS[project]:
            session.install(*PINNED, *packages.split())
        session.install(*PINNED, "-e", ".[conformance]")
        if project in NPM:
            _npm(session, NPM[project])
    except nox.command.CommandFailed:
        for name in names:
            _note(name, "others", "does not install here", project)
        session.skip(f"{project} does not install here")
    session.env.update({"HF_HUB_OFFLINE": "1", "HOME": str(Path(session.create_tmp()).absolute())})
    for name in names:
        apart = ("--isolate",) if name in ISOLATED else ()
        # 1 is a finding (docs/findings.md); 2 that too little can be judged, or that it cannot run: then there is no file.
        file = _check(session, name, "others", project, ("--timeout", "120", *apart), success_codes=(0, 1, 2))
        if not file.exists():
            continue
        before = Path("docs/results/checks", f"{name}.json")
        if before.exists():
            session.run("kvref", "report", str(file), "--since", str(before))
        _publish(name, file)


def _publish(name: str, file: Path) -> None:
    """Put results, and the traces of what failed, where the site reads both, in the place of older ones."""
    folder = Path("docs/results")
    (folder / ".kvref/failures").mkdir(parents=True, exist_ok=True)
    shutil.copy(file, folder / "checks" / f"{name}.json")
    for clause in json.loads(file.read_text())["clauses"]:
        (folder / f".kvref/failures/{clause['clause']}-{name}.jsonl").unlink(missing_ok=True)
        if clause["trace"]:
            (folder / clause["trace"]).write_text(without_arrays(Path(clause["trace"]).read_text()))


def without_arrays(trace: str) -> str:
    """A trace of at most LARGEST_TRACE characters as it is, a larger one without its arrays: its replay runs the check again."""
    if len(trace) <= LARGEST_TRACE:
        return trace
    header, *lines = map(json.loads, trace.splitlines())
    for line in lines:
        for name in ("clause", "chosen", "within", "tolerant"):  # what a replay without the check would need
            line.pop(name, None)
        line |= line.pop("got", {})
    lines[-1]["failed"] = header["failed"]
    return "".join(f"{json.dumps(line)}\n" for line in [header | {"judge": "check"}, *map(_summarised, lines)])


def _summarised(value: Any) -> Any:
    if isinstance(value, list):
        return [_summarised(part) for part in value]
    if isinstance(value, dict) and "base64" in value:
        return f"{value['dtype']}{value['shape']}"
    return {name: _summarised(part) for name, part in value.items()} if isinstance(value, dict) else value


def _npm(session: nox.Session, package: str) -> None:
    """Install a package where Node finds it. Raises CommandFailed. onnxruntime's script would bring CUDA."""
    folder = Path(session.create_tmp()).absolute()
    skip = {"ONNXRUNTIME_NODE_INSTALL": "skip"}
    session.run("npm", "install", "--silent", "--no-audit", "--prefix", str(folder), package, external=True, env=skip)
    session.env["NODE_PATH"] = str(folder / "node_modules")


def others_of(project: str) -> list[str]:
    """The implementations that are judged with a project: of several whose names begin theirs, with the longest."""
    known = PROJECT["project"]["entry-points"]["kvref.implementations"]
    whose = {name: [each for each in OTHERS if name == each or name.startswith(f"{each}-")] for name in known}
    return [name for name, projects in whose.items() if max(projects, key=len, default="") == project]


@nox.session(venv_backend=WITH_PIP)
def gpu(session: nox.Session) -> None:
    """Every clause on the GPU, with CuPy and PyTorch, and a bench of both: the results go to docs/results, to be committed."""
    if not shutil.which("nvidia-smi"):
        for name in GPU:
            _note(name, "GPU", "no GPU here")
        session.skip("no GPU here")
    session.install("-c", "constraints.txt", "torch", "cupy-cuda12x", "numpy")
    session.install("-c", "constraints.txt", ".[conformance]")
    folder = Path("docs/results")
    folder.mkdir(parents=True, exist_ok=True)
    for name in GPU:
        _check(session, name, "GPU", "", folder=folder)
    plot, figures = folder / "bench-gpu.svg", folder / "bench-gpu.json"
    session.run("kvref", "bench", "cupy", "torch:cuda", "torch-compiled:cuda", "--json", str(figures), "--plot", str(plot))


@nox.session(venv_backend="none")
def table(session: nox.Session) -> None:
    """What the sessions found: a line an implementation and place. What earlier runs found stands apart, with its age."""
    for line in table_of([json.loads(path.read_text()) for path in RESULTS.glob("*.note")], RUN, time.time()):
        session.log(line)
    for python in PYTHONS:
        if python not in HERE:
            session.log(f"{f'Python {python}':22} no such Python here")


def table_of(notes: list[dict[str, Any]], run: str, now: float) -> list[str]:
    """The lines of the table, at a time in seconds."""

    def lines(notes: list[dict[str, Any]]) -> Iterator[str]:
        for note in sorted(notes, key=lambda note: (note["place"], note["library"], note["name"])):
            old = "" if note["run"] == run else f"   {_age(now - note['made'])} ago"
            yield f"{note['place']:22} {note['library']:12} {note['name']:22} {note['said']}{old}"

    own = [note for note in notes if note["run"] == run]
    before = [note for note in notes if note["run"] != run]
    heading = f"{'':22} {'':12} {'implementation':22} {'passed':>7} {'failed':>7}   judged"
    return [heading, *lines(own), *(["not of this run, but of earlier ones:", *lines(before)] if before else [])]


def _age(seconds: float) -> str:
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'' if count == 1 else 's'}"
    return "less than a minute"


@nox.session
def mutation(session: nox.Session) -> None:
    """Change kvref's code in some thousand small ways: the judge and the tests must notice. Takes a quarter of an hour.

    `nox -s mutation -- "kvref.tiered*"` mutates one module; `mutmut show NAME` then shows a survivor.
    """
    session.install(*PINNED, "-e", ".[dev]", "mutmut")
    # The judge's checks are collected from the mutants' own tree, which has to be there for Python to look into it.
    tree = [Path("mutants", folder).absolute() for folder in ("conformance", "backends")]
    for folder in tree:
        folder.mkdir(parents=True, exist_ok=True)
    session.env["PYTHONPATH"] = os.pathsep.join(map(str, tree))
    session.run("mutmut", "run", *(session.posargs or [f"kvref.{name}*" for name in MUTATED]))
    session.run("mutmut", "results")
    session.run("python", "conformance/tests/mutants.py", "--least", "0.9")


def _check(
    session: nox.Session, name: str, place: str, library: str, options: tuple[str, ...] = (), folder: Path = RESULTS,
    success_codes: tuple[int, ...] = (0,),
) -> Path:  # fmt: skip
    """`kvref check`, with a note of its results where the table finds it. The file of its results."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    file = folder / f"{_slug(name, place, library)}.json"
    file.unlink(missing_ok=True)
    _note(name, place, "it did not finish", library)
    try:
        session.run("kvref", "check", name, "--json", str(file), *options, success_codes=success_codes)
    finally:
        if file.exists():
            _note(name, place, found(json.loads(file.read_text())), library)
    return file


def found(document: dict[str, Any]) -> str:
    """What a file of results comes to: as many words as the table has columns for."""
    verdicts = [clause["verdict"] for clause in document["clauses"]]
    conclusion = document["conclusion"]
    share = f"{conclusion['judged']} of {conclusion['of']}{': not judged' if conclusion['verdict'] == 'not judged' else ''}"
    return f"{verdicts.count('passed'):7} {verdicts.count('failed'):7}   {share}"


def _note(name: str, place: str, said: str, library: str = "") -> None:
    """What was found lies in the note itself: the file it comes from may be another's by the time the table is made."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    note = {"name": name, "place": place, "library": library, "said": said, "run": RUN, "made": time.time()}
    (RESULTS / f"{_slug(name, place, library)}.note").write_text(json.dumps(note))


def _slug(*words: str) -> str:
    return "-".join(word.replace(" ", "-").replace(":", "-") for word in words if word)
