"""Sessions: tests, lint, types, and the specification on each array namespace. `nox -l` lists them."""

import os
import shutil

import nox

nox.options.default_venv_backend = "venv"

PINNED = ("-c", "constraints.txt")
LIBRARIES = {
    "numpy": ["conformance"],
    "strict": ["conformance", "array-api-strict"],
    "torch": ["conformance", "torch"],
    "cupy": ["conformance", "cupy"],
}
MUTATED = ("formats", "blocks", "buffers", "contiguous", "paged", "quantized", "tiered", "pooled", "rows", "attention", "inputs")
THEIRS = ("transformers-dynamic", "transformers-static", "ml_dtypes", "torch-float8")


@nox.session
def tests(session: nox.Session) -> None:
    """The tests, as the README runs them: NumPy and strict."""
    session.install(*PINNED, "-e", ".[dev]")
    session.run("pytest", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    session.install(*PINNED, "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    session.install(*PINNED, "-e", ".[dev]")
    session.run("mypy")


@nox.session
@nox.parametrize("library", list(LIBRARIES))
def namespace(session: nox.Session, library: str) -> None:
    """`kvref check` of the reference on one array library, and of the backend of that name where there is one."""
    if library == "cupy" and not shutil.which("nvidia-smi"):
        session.skip("no GPU here")
    if library == "torch":
        session.install(*PINNED, "torch")  # first and by its exact pin: anything looser may bring gigabytes of CUDA
    extras = [name for name in LIBRARIES[library] if "-" not in name]
    session.install(*PINNED, f".[{','.join(extras)}]", *(name for name in LIBRARIES[library] if "-" in name))
    session.run("kvref", "check", "reference" if library == "numpy" else f"reference:{library}")
    if library == "numpy":
        session.run("kvref", "check", "numpy")


@nox.session
def theirs(session: nox.Session) -> None:
    """The tests that need torch and transformers, and a report on the caches other people wrote."""
    session.install(*PINNED, "torch")
    session.install(*PINNED, "-e", ".[dev]", "transformers")
    session.run("pytest", "-m", "torch", *session.posargs)
    for name in THEIRS:
        # 1 is a finding (docs/findings.md), which the tests hold still; 2 would be a judge that cannot run.
        session.run("kvref", "check", name, success_codes=[0, 1])


@nox.session
def browser(session: nox.Session) -> None:
    """The report in headless Chromium, which has to be here (apt install chromium)."""
    if not (os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")):
        session.skip("no chromium here")
    session.install(*PINNED, "-e", ".[dev]", "playwright")
    session.run("pytest", "-n", "0", "-m", "browser", "conformance/tests/test_browser.py", *session.posargs)


@nox.session
def mutation(session: nox.Session) -> None:
    """Change kvref's code in some thousand small ways: the judge and the tests must notice. Takes a quarter of an hour.

    `nox -s mutation -- "kvref.tiered*"` mutates one module; `mutmut show NAME` then shows a survivor.
    """
    session.install(*PINNED, "-e", ".[dev]", "mutmut")
    session.run("mutmut", "run", *(session.posargs or [f"kvref.{name}*" for name in MUTATED]))
    session.run("mutmut", "results")
    session.run("python", "conformance/tests/mutants.py", "--least", "0.9")
