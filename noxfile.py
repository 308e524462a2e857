"""Sessions: tests, lint, types, and a matrix of all clauses on each installed Python and array library. `nox -l` lists them.

`nox` without arguments runs all sessions that this machine supports. It ends with a table of the results, which also lists what
was left out and why.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import tarfile
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nox

nox.options.default_venv_backend = "uv|venv"
WITH_PIP = "venv"  # for torch: the configuration of pip may select a build of it, and uv does not read that file
# allow_parallel: sessions that use one core and write to files of their own. `nox -j auto` runs them in parallel.
nox.options.sessions = [
    "tests", "extended", "lint", "types", "matrix", "theirs", "harnesses", "docs", "wheel", "browser", "gpu", "table",
]  # fmt: skip

PYTHONS = ("3.11", "3.12", "3.13")


def _pythons() -> list[str]:
    """The versions of PYTHONS that are installed. Makes all versions that pyenv has available to this process."""
    if shutil.which("pyenv"):
        known = subprocess.run(["pyenv", "versions", "--bare"], capture_output=True, text=True, check=False).stdout.split()
        wanted = [version for version in known if version.rpartition(".")[0] in PYTHONS]
        os.environ.setdefault("PYENV_VERSION", ":".join(sorted(wanted, key=lambda version: version != platform.python_version())))
    here = {python: shutil.which(f"python{python}") for python in PYTHONS}
    return [python for python, path in here.items() if path and not subprocess.run([path, "-V"], capture_output=True).returncode]


HERE = _pythons()
PINNED = ("-c", "constraints.txt")
OLDEST_NUMPY = "2.1.0"  # the lower bound in pyproject.toml
# The implementations to judge with each library. The reference on NumPy exercises NumPy most.
JUDGED = {
    "numpy": ("reference", "numpy"),
    "numpy-oldest": ("reference",),
    "strict": ("reference:strict:token-hits",),
}
# For all runs but the first: more call sequences would not find differences between Pythons or libraries. Another seed might.
OTHERWISE = ("--examples", "10", "--seed", "1")
MUTATED = (
    "formats", "block_pool", "block_tables", "buffers", "contiguous", "paged", "prefix", "rope", "quantized", "tiered", "pooled",
    "rows", "attention", "validation", "block_sequences", "windowed", "grouped", "latent", "channels", "sharded", "recurrent",
    "transfer", "recurrences", "hybrid", "pruned", "ragged", "sparse", "tree", "cross", "compressed",
)  # fmt: skip
ADAPTERS = Path("conformance/adapters")  # the distribution kvref-adapters
ENTRIES = tomllib.loads((Path(__file__).parent / ADAPTERS / "pyproject.toml").read_text())["project"]["entry-points"]
FOLDERS = (Path(__file__).parent / ADAPTERS / "kvref_adapters").glob("*/install.txt")
# The commands that install a third-party project, by its folder. torch must be first where it is needed, because anything looser
# than its exact pin may install gigabytes of CUDA. vLLM, SGLang and LMDeploy are installed without the packages of their
# engines and kernels.
OTHERS = {file.parent.name: file.read_text().splitlines() for file in sorted(FOLDERS)}
# kvref's own implementations whose results are committed: what `kvref check` judges, and the commands that build it.
OWN = {
    "numpy": ("numpy",),
    "reference": ("reference",),
    "torch": ("torch",),
    "harness-javascript": ("exec:node conformance/harnesses/javascript/harness.mjs",),
    "harness-cpp": (
        "exec:.nox/harnesses/cpp/harness",
        "cmake -S conformance/harnesses/cpp -B .nox/harnesses/cpp",
        "cmake --build .nox/harnesses/cpp",
    ),
    "harness-rust": (
        "exec:.nox/harnesses/rust/release/harness",
        "cargo build --release --offline --manifest-path conformance/harnesses/rust/Cargo.toml --target-dir .nox/harnesses/rust",
    ),
}
LARGEST_TRACE = 200_000  # characters of a trace in docs/results
ISOLATED = ("onnxruntime-multi-head", "ik_llama.cpp", "ik_llama.cpp-no-flash")  # they may end their process
AXE = "axe-core@4.14.1"
BROWSED = [f"conformance/tests/test_{name}.py" for name in ("report_pages", "site", "player", "player_answers", "player_files")]
GPU = ("cupy", "reference:cupy", "torch:cuda", "torch-compiled:cuda")
RESULTS = Path(".nox/results")  # notes of the sessions, for the table
# An id of this run. With -j each session is a child process, which inherits it.
RUN = os.environ.setdefault("KVREF_NOX_RUN", f"{time.time()}-{os.getpid()}")


@nox.session
def tests(session: nox.Session) -> None:
    """The tests of the README's command, with NumPy and array-api-strict."""
    session.install(*PINNED, "-e", ".[dev]")
    session.run("pytest", *session.posargs)


@nox.session
def extended(session: nox.Session) -> None:
    """The slowest tests, which the README's command leaves out."""
    session.install(*PINNED, "-e", ".[dev]")
    session.run("pytest", "-m", "extended and not torch and not long", "--dist", "worksteal", *session.posargs)


@nox.session
def long(session: nox.Session) -> None:
    """Full products of parameters, of which the other tests run a part. By hand, if checks or state machines changed."""
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
    """`kvref check` of the reference and of NumPy, on each installed Python, the oldest NumPy and array-api-strict."""
    pinned = PINNED
    if library == "numpy-oldest":
        others = [line for line in Path("constraints.txt").read_text().splitlines() if not line.startswith("numpy==")]
        constraints = Path(session.create_tmp()) / "constraints.txt"
        constraints.write_text("\n".join([*others, f"numpy=={OLDEST_NUMPY}", ""]))
        pinned = ("-c", str(constraints))
    session.install(*pinned, ".[conformance]", *(["array-api-strict"] if library == "strict" else []))
    at = HERE.index(session.python)
    name = JUDGED[library][at % len(JUDGED[library])]  # the Pythons take turns, because little but the Python differs
    whole = library == "numpy" and not at  # the reference; `kvref check numpy` of the README judges numpy in full
    _check(session, name, f"Python {session.python}", library, () if whole else OTHERWISE)


@nox.session(venv_backend=WITH_PIP)
def theirs(session: nox.Session) -> None:
    """The tests that need torch or llama.cpp, `kvref check` of the torch backend, and of the reference on torch."""
    session.install(*PINNED, "torch")  # first and by its exact pin: anything looser may install gigabytes of CUDA
    session.install(*PINNED, "-e", ".[dev]", "-e", str(ADAPTERS), "transformers", "triton", "xllamacpp", "psutil")
    session.run("pytest", "-m", "torch or llama", *session.posargs)
    for name in ("torch", "reference:torch"):
        _check(session, name, "torch", "CPU", (*OTHERWISE, "--jobs", "2"))


@nox.session
def jax(session: nox.Session) -> None:
    """The reference on JAX, whose arrays are immutable. By hand: JAX compiles each new shape, which takes half an hour."""
    session.install(*PINNED, "-e", ".[dev]", "jax")
    session.run("pytest", "-m", "jax", *session.posargs)
    _check(session, "reference:jax", "jax", "CPU", ("--timeout", "300"), success_codes=(0, 1))


@nox.session(allow_parallel=True)
def harnesses(session: nox.Session) -> None:
    """Judges the harnesses in C++, Rust and JavaScript, and `kvref init`. -rs lists those whose toolchain is not installed."""
    session.install(*PINNED, "-e", ".[dev]")
    files = ["conformance/tests/test_harnesses.py", "conformance/tests/test_init.py"]
    session.run("pytest", "-n", "0", "-rs", "-m", "harness", *files, *session.posargs)


@nox.session(allow_parallel=True)
def docs(session: nox.Session) -> None:
    """Updates generated parts of docs, and fails if any changed; builds the site in docs/_build/html. Warnings are errors."""
    session.install(*PINNED, "-e", ".[docs]")
    session.run("python", "docs/_tools/generate_committed_parts.py")
    session.run(
        "sphinx-build", "-W", "-E", "--keep-going", "-q", "-d", "docs/_build/doctrees", "-b", "html", "docs", "docs/_build/html"
    )


LARGEST_FILE = 2**20  # bytes of one file in a distribution
WHEEL_PACKAGES = {
    "kvref": {
        "kvref", "kvref_numpy", "kvref_torch", "kvref_cupy", "kvref_conformance", "kvref_canary", "kvref_bench", "kvref_zoo",
        "kvref_labs",
    },
    "kvref_adapters": {"kvref_adapters"},
}  # fmt: skip


@nox.session(allow_parallel=True)
def wheel(session: nox.Session) -> None:
    """Builds the distributions, and judges with the wheel of kvref alone, in an environment outside the checkout."""
    session.install(*PINNED, "build", "twine")
    dist = Path(session.create_tmp(), "dist").absolute()
    shutil.rmtree(dist, ignore_errors=True)
    for source in (".", str(ADAPTERS)):
        session.run("python", "-m", "build", "--outdir", str(dist), source, silent=True)
    built = sorted(map(str, dist.iterdir()))
    session.run("twine", "check", "--strict", *built)
    if wrong := [problem for file in built for problem in distribution_problems(Path(file))]:
        session.error("; ".join(wrong))
    constraints = Path("constraints.txt").absolute()
    with tempfile.TemporaryDirectory() as name, session.chdir(name):
        session.run("python", "-m", "venv", "env")
        (file,) = dist.glob("kvref-*.whl")
        programs = Path(name, "env", "bin")
        session.run(str(programs / "pip"), "install", "-q", "-c", str(constraints), f"{file}[conformance]", external=True)
        for command in (
            ("--version",),
            ("check", "numpy", "--family", "contiguous"),
            ("lab", "list"),
            *(
                ("init", "--family", "contiguous", "--language", each, "-o", each)
                for each in ("python", "cpp", "rust", "javascript")
            ),
        ):
            session.run(str(programs / "kvref"), *command, external=True, env={"PYTHONPATH": ""})


def distribution_problems(file: Path) -> Iterator[str]:
    """One text per file of a wheel or an sdist that does not belong there, and per package that is missing."""
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as archive:
            sizes = {each.filename: each.file_size for each in archive.infolist()}
        packages = {name.partition("/")[0] for name in sizes if ".dist-info/" not in name}
        if packages != (expected := WHEEL_PACKAGES[file.name.partition("-")[0]]):
            yield f"{file.name}: expected the packages {sorted(expected)}, got {sorted(packages)}"
    else:
        with tarfile.open(file) as source:
            sizes = {each.name.partition("/")[2]: each.size for each in source.getmembers() if each.isfile()}
        if "pyproject.toml" not in sizes:
            yield f"{file.name}: no pyproject.toml"
    for name, size in sizes.items():
        folders = Path(name).parts
        if size > LARGEST_FILE:
            yield f"{file.name}: {name} has {size} bytes, at most {LARGEST_FILE}"
        if name.endswith((".pyc", "~")) or {"__pycache__", ".git", ".nox", ".venv", ".hypothesis"} & set(folders):
            yield f"{file.name}: {name} is not a source file"
        if file.suffix == ".whl" and ({"tests", "conftest.py"} & set(folders) or folders[-1].startswith("test_")):
            yield f"{file.name}: {name} is a test of kvref itself"


@nox.session(requires=["docs"])
def browser(session: nox.Session) -> None:
    """Tests the report and the site in headless Chromium, which must be installed (apt install chromium)."""
    if not (os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")):
        session.skip("chromium is not installed")
    session.install(*PINNED, "-e", ".[dev]", "playwright")
    if shutil.which("npm"):  # for the accessibility tests, which are skipped without npm
        folder = Path(session.create_tmp())
        session.run("npm", "install", "--silent", "--no-audit", "--prefix", str(folder), AXE, external=True)
        session.env["AXE"] = str(folder / "node_modules/axe-core/axe.min.js")
    session.run("pytest", "-rs", "-m", "browser", *BROWSED, *session.posargs)


@nox.session(venv_backend=WITH_PIP, reuse_venv=True)
@nox.parametrize("project", list(OTHERS))
def others(session: nox.Session, project: str) -> None:
    """Judges third-party projects, one environment per project. Commit docs/results afterwards. By hand: downloads gigabytes.

    project: the folder of the project in conformance/adapters/kvref_adapters.
    """
    names = others_of(project)
    try:
        for command in OTHERS[project]:
            program, _, *packages = command.split()
            if program == "npm":
                _npm(session, *packages)
            else:
                session.install(*PINNED, *packages)
        session.install(*PINNED, "-e", ".[conformance]", "-e", str(ADAPTERS))
    except nox.command.CommandFailed:
        for name in names:
            _note(name, "others", "cannot be installed", project)
        session.skip(f"{project} cannot be installed")
    session.env.update({"HF_HUB_OFFLINE": "1", "HOME": str(Path(session.create_tmp()).absolute())})
    for name in names:
        apart = ("--isolate",) if name in ISOLATED else ()
        # Exit status 1 is a finding (docs/findings.md). 2: not judged, or it could not run; then there may be no file.
        file = _check(session, name, "others", project, ("--timeout", "120", *apart), success_codes=(0, 1, 2))
        if not file.exists():
            continue
        before = Path("docs/results/checks", f"{name}.json")
        if before.exists():
            session.run("kvref", "report", str(file), "--since", str(before))
        _publish(name, file)


@nox.session(venv_backend=WITH_PIP)
def renew(session: nox.Session) -> None:
    """Judges again what has stale results (`kvref report --stale`). Commit docs/results afterwards. By hand: may take hours."""
    session.install(*PINNED, "torch")
    session.install(*PINNED, "-e", ".[conformance]", "ml_dtypes")  # ml_dtypes: for arrays of bfloat16 from programs
    files = sorted(map(str, Path("docs/results/checks").glob("*.json")))
    listed = session.run("kvref", "report", *files, "--stale", silent=True, success_codes=(0, 1))
    stale = set(re.findall(r"^docs/results/checks/(.+)\.json: ", str(listed), re.MULTILINE))
    for project in OTHERS:
        if stale.intersection(others_of(project)):
            session.notify(f"others(project='{project}')")
    for name in sorted(stale & OWN.keys()):
        program, *builds = OWN[name]
        for command in builds:
            session.run(*command.split(), external=True)
        file = _check(session, name, "own", "", success_codes=(0, 1), program=program)
        file.write_text(re.sub('"project": ".*?"', '"project": "kvref"', file.read_text(), count=1))  # a program names none
        _publish(name, file)


def _publish(name: str, file: Path) -> None:
    """Copy the results, and the traces of failures, to the folder that the site reads. Replaces older ones."""
    folder = Path("docs/results")
    (folder / ".kvref/failures").mkdir(parents=True, exist_ok=True)
    shutil.copy(file, folder / "checks" / f"{name}.json")
    for clause in json.loads(file.read_text())["clauses"]:
        (folder / f".kvref/failures/{clause['clause']}-{name}.jsonl").unlink(missing_ok=True)
        if clause["trace"]:
            (folder / clause["trace"]).write_text(without_arrays(Path(clause["trace"]).read_text()))


def without_arrays(trace: str) -> str:
    """The trace. If it has more than LARGEST_TRACE characters, without its arrays; then a replay runs the check again."""
    if len(trace) <= LARGEST_TRACE:
        return trace
    header, *lines = map(json.loads, trace.splitlines())
    for line in lines:
        for name in ("clause", "chosen", "within", "tolerant"):  # only a replay without the check needs these
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


def _npm(session: nox.Session, *packages: str) -> None:
    """Install packages where Node finds them. Raises CommandFailed. Skips onnxruntime's script, which would download CUDA."""
    folder = Path(session.create_tmp()).absolute()
    skip = {"ONNXRUNTIME_NODE_INSTALL": "skip"}
    session.run("npm", "install", "--silent", "--no-audit", "--prefix", str(folder), *packages, external=True, env=skip)
    session.env["NODE_PATH"] = str(folder / "node_modules")


def others_of(project: str) -> list[str]:
    """The implementations whose adapters are in the folder of a project."""
    entries = ENTRIES["kvref.implementations"]
    return [name for name, where in entries.items() if where.startswith(f"kvref_adapters.{project}.")]


@nox.session(venv_backend=WITH_PIP)
def gpu(session: nox.Session) -> None:
    """Judges every clause on the GPU, with CuPy and PyTorch, and benchmarks both. Commit the results in docs/results."""
    if not shutil.which("nvidia-smi"):
        for name in GPU:
            _note(name, "GPU", "no GPU")
        session.skip("no GPU")
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
    """Prints the results of the sessions, one line per implementation and place. Results of earlier runs follow, with age."""
    for line in table_of([json.loads(path.read_text()) for path in RESULTS.glob("*.note")], RUN, time.time()):
        session.log(line)
    for python in PYTHONS:
        if python not in HERE:
            session.log(f"{f'Python {python}':22} not installed")


def table_of(notes: list[dict[str, Any]], run: str, now: float) -> list[str]:
    """The lines of the table. now: the time in seconds, for the age of earlier results."""

    def lines(notes: list[dict[str, Any]]) -> Iterator[str]:
        for note in sorted(notes, key=lambda note: (note["place"], note["library"], note["name"])):
            old = "" if note["run"] == run else f"   {_age(now - note['made'])} ago"
            yield f"{note['place']:22} {note['library']:12} {note['name']:22} {note['said']}{old}"

    own = [note for note in notes if note["run"] == run]
    before = [note for note in notes if note["run"] != run]
    heading = f"{'':22} {'':12} {'implementation':22} {'passed':>7} {'failed':>7}   judged"
    return [heading, *lines(own), *(["results of earlier runs:", *lines(before)] if before else [])]


def _age(seconds: float) -> str:
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'' if count == 1 else 's'}"
    return "less than a minute"


@nox.session
def mutation(session: nox.Session) -> None:
    """Makes some thousand small changes to kvref/. The judge and the tests must detect them. Takes a quarter of an hour.

    `nox -s mutation -- "kvref.tiered*"` mutates one module; `mutmut show NAME` then shows a survivor.
    """
    session.install(*PINNED, "-e", ".[dev]", "mutmut")
    # pytest collects the checks from the tree of the mutants. Python searches a folder only if it exists at the start.
    tree = [Path("mutants", folder).absolute() for folder in ("conformance", "backends")]
    for folder in tree:
        folder.mkdir(parents=True, exist_ok=True)
    session.env["PYTHONPATH"] = os.pathsep.join(map(str, tree))
    session.run("mutmut", "run", *(session.posargs or [f"kvref.{name}*" for name in MUTATED]))
    session.run("mutmut", "results")
    session.run("python", "conformance/tests/mutants.py", "--least", "0.9")


def _check(
    session: nox.Session, name: str, place: str, library: str, options: tuple[str, ...] = (), folder: Path = RESULTS,
    success_codes: tuple[int, ...] = (0,), program: str = "",
) -> Path:  # fmt: skip
    """Runs `kvref check` and writes a note for the table. Returns the path of the JSON results.

    program: what it judges, if that is not `name`.
    """
    RESULTS.mkdir(parents=True, exist_ok=True)
    file = folder / f"{_slug(name, place, library)}.json"
    file.unlink(missing_ok=True)
    _note(name, place, "it did not finish", library)
    try:
        session.run("kvref", "check", program or name, "--json", str(file), *options, success_codes=success_codes)
    finally:
        if file.exists():
            _note(name, place, found(json.loads(file.read_text())), library)
    return file


def found(document: dict[str, Any]) -> str:
    """The results in the columns of the table: passed, failed, judged."""
    verdicts = [clause["verdict"] for clause in document["clauses"]]
    conclusion = document["conclusion"]
    share = f"{conclusion['judged']} of {conclusion['of']}{': not judged' if conclusion['verdict'] == 'not judged' else ''}"
    return f"{verdicts.count('passed'):7} {verdicts.count('failed'):7}   {share}"


def _note(name: str, place: str, said: str, library: str = "") -> None:
    """Write a note. It contains the numbers themselves, because another session may overwrite the file of the results."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    note = {"name": name, "place": place, "library": library, "said": said, "run": RUN, "made": time.time()}
    (RESULTS / f"{_slug(name, place, library)}.note").write_text(json.dumps(note))


def _slug(*words: str) -> str:
    return "-".join(word.replace(" ", "-").replace(":", "-") for word in words if word)
