"""The `kvref` command: init, check, soak, search, replay, harness, vectors, report, zoo, lab, bench, canary, list, explain.

Exit status: 0 conformant, 1 not conformant, 2 not judged or could not run, 130 interrupted. A user's mistake prints one line,
never a traceback. Ctrl-C prints no traceback either: `main` installs its handler before it imports almost anything.
"""

from __future__ import annotations

import shlex
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from kvref_conformance.calls import interrupts

if TYPE_CHECKING:
    import argparse

EXIT_CANNOT_RUN = 2
CRASH_REPORT = ".kvref/crash.txt"

_EPILOG = """\
implementations:
  reference         the reference caches on NumPy
  reference:torch   the same on another library: torch, strict, jax, cupy
  numpy:token-hits  one of these whose prefix cache finds single tokens
  numpy, ...        a backend of kvref or an adapter: `kvref list` shows all
  zoo:MEMBER        a cache with a planted bug: `kvref zoo` shows all
  module:object     your implementation in Python
  mycache           a program whose command is in ./kvref.toml:
                    [implementations.mycache]
                    exec = ["./harness", "--flag"]

exit status: 0 conformant, or only the failures in --xfails; 1 a clause is
broken; 2 not judged: too few clauses could be judged, or it could not run;
130 Ctrl-C
"""

_ISOLATE = (
    "run the implementation in a child process (default, except for kvref's own). --no-isolate runs it in this process, for a "
    "debugger; code that ends the process then also ends kvref, silently and with any exit status"
)

_JOBS = (
    "number of parallel processes, each with its own implementation (default 1; for kvref's own implementations, if all clauses "
    "are selected, the number of processors, at most 4)"
)


def _parser() -> argparse.ArgumentParser:
    import argparse
    import re

    from kvref_conformance.drivers.resource_limits import SERVER_TIMEOUT, TIMEOUT
    from kvref_conformance.exceptions import suggest
    from kvref_conformance.runner.options import EXAMPLES
    from kvref_conformance.runner.verdict import MIN_JUDGED_PERCENT

    patience = f"maximum seconds per call (default {TIMEOUT:g}; {SERVER_TIMEOUT:g} for a server)"

    class Once(argparse.Action):
        """Rejects an option that is given twice, of which argparse would use the last one silently."""

        def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
            if getattr(namespace, self.dest) is not None:
                parser.error(f"argument {option_string}: expected one, got {getattr(namespace, self.dest)} and {values}")
            setattr(namespace, self.dest, values)

    class Version(argparse.Action):
        """Prints the version of kvref, and the size of the specification that it judges by."""

        def __call__(self, parser: argparse.ArgumentParser, *args: Any) -> NoReturn:
            from kvref import __version__
            from kvref_conformance.clauses import all_clauses, spec

            print(f"kvref {__version__}: {len(all_clauses())} clauses in {len(spec())} chapters")
            parser.exit()

    class Parser(argparse.ArgumentParser):
        """Suggests the nearest choice for one that does not exist. Its subparsers are of this class too."""

        def error(self, message: str) -> NoReturn:
            if found := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
                message += suggest(found[1], re.findall(r"[\w-]+", found[2]))
            super().error(message)

    parser = Parser(prog="kvref", description="Test LLM KV caches against the clauses of a specification.")
    parser.add_argument("--version", action=Version, nargs=0, help="show the version of kvref and its number of clauses")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    init = commands.add_parser(
        "init",
        help="write an adapter for your cache, in Python, C++, Rust or JavaScript",
        description="Write an adapter for your cache into a new folder: it runs at once, and every operation is not offered. "
        "You write the calls of your cache, one operation at a time. The README.md in the folder has the commands. "
        "At a terminal, kvref asks for the family and the language if they are absent.",
        epilog="exit status: 0 written, 2 could not run",
    )
    init.add_argument("--family", metavar="FAMILY", help="what the cache is: contiguous, paged, ... (docs/test-your-cache.md)")
    init.add_argument("--language", metavar="LANGUAGE", help="python, cpp, rust or javascript")
    init.add_argument(
        "--layout", choices=("NHD", "HND"), default="NHD", help="axes of your arrays: tokens or heads first (default %(default)s)"
    )
    init.add_argument("-o", "--output", metavar="DIR", help="folder to write: new or empty (default FAMILY-LANGUAGE)")
    check = commands.add_parser(
        "check",
        help="judge an implementation against the clauses",
        description="Judge an implementation against every clause of the families that it offers.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    check.add_argument("name", metavar="NAME", nargs="?", help="the implementation (see below)")
    check.add_argument(
        "--exec", metavar="COMMAND", help="command of a harness, in any language, to judge instead: './harness --flag'"
    )
    _add_server_options(check)
    check.add_argument("--stderr", action="store_true", help="show what the program writes to its standard error")
    check.add_argument(
        "--family", action="append", metavar="FAMILY",
        help="select the checks of a family: paged, quantized, ...; may be repeated",
    )  # fmt: skip
    check.add_argument(
        "--clause", action="append", metavar="CLAUSE", help="select clauses by id or pattern: PAGED-07, 'FMT-*'; may be repeated"
    )
    check.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the random inputs (default %(default)s)")
    check.add_argument(
        "--examples", type=int, default=EXAMPLES, metavar="N", help="random call sequences per family (default %(default)s)"
    )
    check.add_argument("--deep", action="store_true", help="run 20 times as many call sequences, 3 times as long (half an hour)")
    check.add_argument("--jobs", type=int, metavar="N", help=_JOBS)
    check.add_argument("--isolate", action=argparse.BooleanOptionalAction, help=_ISOLATE)
    check.add_argument("--timeout", type=float, metavar="S", help=patience)
    check.add_argument(
        "--least-judged", type=float, default=MIN_JUDGED_PERCENT, metavar="PERCENT",
        help="minimum percentage of the clauses of the offered families that must be judged; below it the verdict is "
        "'not judged' (default %(default)g)",
    )  # fmt: skip
    check.add_argument("--traces", metavar="DIR", help="folder to write the traces of passed checks to")
    check.add_argument("--slow", action="store_true", help="include the checks that need gigabytes of memory")
    check.add_argument("--real", action="store_true", help="include the larger checks of LAW-18 (a minute)")
    check.add_argument("--json", metavar="FILE", help="file to write the results to, as JSON")
    check.add_argument("--junit", metavar="FILE", help="file to write the results to, as JUnit XML")
    check.add_argument(
        "--since", metavar="OLD", help="results of an earlier run (--json): the clauses that failed then are expected to fail"
    )
    check.add_argument("--xfails", metavar="FILE", help="file of the clauses that are expected to fail, one per line")
    check.add_argument("--all", action="store_true", help="print every failure in full, not one per probable cause")
    check.add_argument("--update-xfails", action="store_true", help="write the clauses that fail now to the file of --xfails")
    check.add_argument(
        "--list",
        action="store_true",
        help="list the checks; with NAME, which clauses can be judged with its operations, without judging it",
    )
    soak = commands.add_parser(
        "soak",
        help="run a serving workload on an implementation's caches or on a server",
        description="Run a serving workload on every cache family of an implementation, at production sizes: requests arrive, "
        "finish, are cancelled, exhaust the blocks and, in a prefix cache, share prefixes. Every token that is read is checked. "
        "With --server, send many requests to a server at once and compare every generated token with the canary's.",
        epilog="exit status: 0 all tokens were right; 1 a token was wrong, or a request to the server failed; 2 nothing could be "
        "judged; 130 Ctrl-C",
    )
    _add_implementation_options(soak)
    soak.add_argument(
        "--minutes", type=float, default=1.0, metavar="N", help="total duration, divided among the families (default %(default)g)"
    )
    soak.add_argument("--concurrency", type=int, metavar="N", help="with --server: number of requests at once (default 8)")
    soak.add_argument("--family", action=Once, metavar="FAMILY", help="select one family: paged, contiguous, ...")
    soak.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the workload (default %(default)s)")
    soak.add_argument("--isolate", action=argparse.BooleanOptionalAction, help=_ISOLATE)
    soak.add_argument("--timeout", type=float, metavar="S", help=patience)
    soak.add_argument("--json", metavar="FILE", help="file to write the figures to, as JSON")
    soak.add_argument("--plot", metavar="FILE.svg", help="with --server: file to draw the figures over time in")
    search = commands.add_parser(
        "search",
        help="fuzz an implementation on all processors for a given time",
        description="Fuzz an implementation with many processes for a given time: random call sequences, the checks of "
        "`kvref check` with new random inputs and at production sizes, and short soaks. Call sequences that reach new states of "
        "the model are kept as seeds. Each distinct failure is reported once, minimized, with a trace like those of "
        "`kvref check`. The next search continues from the seeds.",
        epilog="exit status: 0 no failure was found; 1 a clause is broken; 2 nothing could be judged; 130 Ctrl-C, which keeps "
        "all results. Needs Dask: pip install '.[search]' in a clone",
    )
    _add_implementation_options(search)
    search.add_argument("--family", action=Once, metavar="FAMILY", help="search one family only: paged, quantized, ...")
    search.add_argument("--hours", type=float, metavar="N", help="duration in hours")
    search.add_argument("--minutes", type=float, metavar="N", help="duration in minutes, added to --hours")
    search.add_argument(
        "--workers", type=int, metavar="N", help="number of processes on this machine (default: the number of processors)"
    )
    search.add_argument(
        "--cluster", metavar="ADDRESS", help="address of a Dask scheduler whose workers to use instead: tcp://host:8786"
    )
    search.add_argument(
        "--corpus", metavar="DIR", help="folder to read seeds from and keep results in (default .kvref/search/NAME)"
    )
    search.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the search (default %(default)s)")
    search.add_argument("--timeout", type=float, metavar="S", help=patience)
    replay = commands.add_parser(
        "replay",
        help="make the calls of a trace again, and print the first reply that differs",
        description="Make the calls of a trace again, with the same implementation or another, and print the first reply that "
        "is not the expected one.",
        epilog="exit status: 0 every reply is as expected; 1 a reply differs; 2 no call could be made, or it could not run",
    )
    replay.add_argument("trace", metavar="FILE", help="the trace, such as .kvref/failures/PAGED-07-mine.jsonl")
    replay.add_argument("name", metavar="NAME", nargs="?", help="the implementation (default: the one that the trace names)")
    replay.add_argument("--exec", metavar="COMMAND", help="command of a harness, in any language, instead")
    _add_server_options(replay)
    replay.add_argument("--isolate", action=argparse.BooleanOptionalAction, help=_ISOLATE)
    replay.add_argument("--timeout", type=float, metavar="S", help=patience)
    report = commands.add_parser(
        "report",
        help="write an HTML report of results, or list what changed",
        description="Write an HTML report of results of `kvref check --json`: a table of implementations and chapters, a page "
        "per clause, and the traces. Or list what changed since older results (--since), list the clauses that changed since the "
        "results were made (--stale), or print a failure as a Python script (--script).",
        epilog="examples: kvref report new.json --since old.json; kvref report --script .kvref/failures/PAGED-07-mine.jsonl "
        "mine:Cache. Exit status: 0, with --stale 1 if there are such clauses; 2 could not run",
    )
    report.add_argument(
        "results",
        metavar="[NAME=]RESULTS.json",
        nargs="*",
        help="results, and a name for the report; with --script: the implementation",
    )
    report.add_argument("-o", "--output", metavar="DIR", help="folder to write the report to: new, empty, or an older report")
    report.add_argument(
        "--annotations", action="store_true", help="print each probable cause as an annotation for GitHub Actions, at its line"
    )
    report.add_argument("--since", metavar="OLD", help="older results to compare with: a file, or a folder of files")
    report.add_argument(
        "--stale",
        action="store_true",
        help="list the clauses whose text or checks changed since the results were made",
    )
    report.add_argument(
        "--script", metavar="TRACE", help="trace to print as a script of the calls that the adapter makes to the library"
    )
    zoo = commands.add_parser(
        "zoo",
        help="judge the caches with a planted bug, and show what finds each bug",
        description="Judge the caches with a planted bug, and show the clause that each breaks,"
        " what finds it, and in how many calls.",
        epilog="""found by: a hand-written check, a random call sequence (state machine), or both.
Exit status: 0 each bug is found by the clause that it names; 1 one is not; 2 could not run""",
    )
    zoo.add_argument("names", metavar="MEMBER", nargs="*", help="members to judge (default: all)")
    _add_lab_command(commands)
    bench = commands.add_parser(
        "bench",
        help="compare the time of kernels and caches with a memcpy and other libraries",
        description="Time the kernels of kvref's backends and whole caches, on one core. Compare them with a memcpy of the bytes "
        "that have to move, and with other libraries that are installed.",
        epilog="Each ratio compares times of the same round, because the speed of a machine varies. All contests take some "
        "minutes and 5 GB of memory.",
    )
    bench.add_argument(
        "backends",
        metavar="BACKEND",
        nargs="*",
        help="numpy, torch, torch-compiled, torch:cuda, ... (default: all that work here)",
    )
    bench.add_argument("--only", default="*", metavar="GLOB", help="select contests by their title: 'quantize*', '* 8 x 128'")
    bench.add_argument(
        "--size", type=int, default=64, metavar="MB", help="size of the float32 input of a kernel in MB (default %(default)s)"
    )
    bench.add_argument("--json", metavar="FILE", help="file to write the figures to, as JSON")
    bench.add_argument("--plot", metavar="FILE.svg", help="file to draw the figures in")
    _add_canary_command(commands)
    harness = commands.add_parser(
        "harness",
        help="test how a harness speaks the protocol",
        description="Test only how a harness speaks the protocol, message by message: hello, making objects, arguments, replies "
        "and errors. `kvref check --exec` judges the cache.",
        epilog="exit status: 0 the protocol works; 1 it does not; 2 could not run",
    )
    harness.add_argument("--selftest", metavar="COMMAND", required=True, help="command of the harness: './harness --flag'")
    harness.add_argument("--stderr", action="store_true", help="show what the harness writes to its standard error")
    harness.add_argument(
        "--timeout", type=float, default=TIMEOUT, metavar="S", help="maximum seconds per reply (default %(default)g)"
    )
    vectors = commands.add_parser(
        "vectors",
        help="write static test vectors, or compare an implementation with them",
        description="Write static test vectors, made from the reference: call traces with the expected replies, and the formats "
        "as safetensors files. Or compare an implementation with such vectors.",
        epilog="exit status: 0 written, or every reply matches; 1 a reply differs; 2 could not run",
    )
    vectors.add_argument("name", metavar="NAME", nargs="?", help="with --check: the implementation (see kvref check --help)")
    vectors.add_argument("-o", "--output", metavar="DIR", help="folder to write the vectors to; replaces older vectors")
    vectors.add_argument("--check", metavar="DIR", help="folder of the vectors to compare an implementation with")
    vectors.add_argument("--exec", metavar="COMMAND", help="with --check: command of a harness, in any language, instead")
    vectors.set_defaults(server=None, canary=None, model=None)  # a server returns tokens; vectors compare numbers
    vectors.add_argument(
        "--timeout", type=float, default=TIMEOUT, metavar="S", help="maximum seconds per call (default %(default)g)"
    )
    commands.add_parser("list", help="list the implementations that have a name, and the packages that are missing for each")
    explain = commands.add_parser(
        "explain", help="show a clause, with the bugs that it would have caught and its checks, or the operations of a family"
    )
    explain.add_argument(
        "clause", metavar="CLAUSE", help="id of a clause (PAGED-07) or of a chapter (WIN), or name of a family (paged)"
    )
    return parser


def _add_implementation_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("name", metavar="NAME", nargs="?", help="the implementation (see kvref check --help)")
    command.add_argument("--exec", metavar="COMMAND", help="command of a harness, in any language, instead")
    _add_server_options(command)


def _add_server_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--server", metavar="URL", help="URL of an OpenAI-compatible server to judge instead: http://127.0.0.1:8000/v1"
    )
    command.add_argument(
        "--canary", metavar="DIR", help="with --server: folder of the canary that it has loaded (kvref canary make DIR)"
    )
    command.add_argument(
        "--model", metavar="NAME", help="with --server: the server's name for the canary (default: its only model)"
    )


def _add_lab_command(commands: argparse._SubParsersAction[Any]) -> None:
    lab = commands.add_parser(
        "lab",
        help="start and check the exercises of the course",
        description="The exercises of the course in docs/how: write a cache, find a planted bug, or predict results. kvref "
        "checks them by the clauses of the specification.",
    ).add_subparsers(dest="subcommand", required=True, metavar="COMMAND")
    lab.add_parser("list", help="list the labs, in the order of the course")
    start = lab.add_parser("start", help="write a folder with the task and the file to edit")
    start.add_argument("lab", metavar="LAB", help="number or name of the lab (kvref lab list)")
    start.add_argument("folder", metavar="DIR", nargs="?", help="folder to write: new or empty (default: lab- and the name)")
    check = lab.add_parser(
        "check",
        help="print what is wrong, or that the lab is solved",
        description="Check the clauses of a lab in their order, and print the first that does not hold, with the shortest calls "
        "that show it.",
        epilog="exit status: 0 solved, 1 not solved, 2 could not run",
    )
    hint = lab.add_parser("hint", help="print the next hint")
    solution = lab.add_parser("solution", help="print a solution")
    for command in (check, hint, solution):
        command.add_argument("folder", metavar="DIR", nargs="?", default=".", help="folder of the lab (default: this folder)")


def _add_canary_command(commands: argparse._SubParsersAction[Any]) -> None:
    from kvref.canary import Canary
    from kvref.canary.hybrid import HYBRIDS
    from kvref_canary.files.architectures import ARCHITECTURES
    from kvref_canary.files.huggingface import DTYPES

    canary = commands.add_parser(
        "canary",
        help="write a model whose tokens reveal which cache entries were read",
        description="A tiny model with hand-constructed weights: each generated token depends on single entries of the KV cache, "
        "or on the recurrent state.",
    ).add_subparsers(dest="subcommand", required=True, metavar="COMMAND")
    make = canary.add_parser(
        "make",
        help="write the model as files that engines load",
        description="Write a canary as a Hugging Face model folder, and as a GGUF file. It generates the token of one period "
        "ago. With --recalls it generates the token that followed the last token at its previous occurrence. "
        f"Architectures with recurrent state ({', '.join(HYBRIDS)}) have fixed sizes.",
        epilog="exit status: 0 written, 2 could not run",
    )
    make.add_argument("folder", metavar="DIR", help="folder to write: new, empty, or an older canary")
    make.add_argument("--gguf", metavar="FILE", help="GGUF file to write too, for llama.cpp")
    make.add_argument(
        "--architecture",
        choices=(*ARCHITECTURES, *HYBRIDS),
        default="llama",
        help="architecture in config.json (default %(default)s)",
    )
    make.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="dtype of the weights (default %(default)s)")
    make.add_argument("--offsets", metavar="N,N", help="how many tokens back each layer attends (default 16,31)")
    make.add_argument("--recalls", action="store_true", help="add an induction head as the last layer, which attends by content, "
                      "not distance; changes the defaults to --offsets 1 --theta 1e6 --head-dim 128")  # fmt: skip
    make.add_argument("--context", type=int, metavar="N", help=f"maximum tokens of prompt and output (default {Canary.context})")
    make.add_argument("--kv-heads", type=int, metavar="N", help=f"number of key-value heads (default {Canary.num_kv_heads})")
    make.add_argument("--query-heads", type=int, metavar="N", help=f"number of query heads (default {Canary.num_query_heads})")
    make.add_argument("--head-dim", type=int, metavar="N", help=f"numbers per head (default {Canary.head_dim})")
    make.add_argument("--theta", type=float, metavar="X", help=f"base of the rotary embedding (default {Canary.theta:g})")
    make.add_argument("--windows", metavar="N,none", help="window of each layer in tokens (default none: all tokens)")
    make.add_argument("--pairs", metavar="N", type=int, help="number of rotary frequency pairs per head that select a position; "
                      "with more pairs the canary detects smaller key errors (default: the most robust number)")  # fmt: skip
    make.add_argument("--intermediate", type=int, metavar="N", help=f"size of the MLP (default {Canary.intermediate_size})")


def main(arguments: Sequence[str] | None = None) -> int:
    interrupts.install_handlers()
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        print("kvref: interrupted", file=sys.stderr)
        return interrupts.EXIT_INTERRUPTED
    finally:
        interrupts.restore_default_handler()


def _run(arguments: Sequence[str] | None) -> int:
    options = _parser().parse_args(arguments)
    try:
        from kvref_conformance.commands import find_command

        run = find_command(options.command)
    except ImportError as error:
        return _cannot_run(f"{options.command} needs {error.name} (in a clone: pip install '.[conformance]')")
    from kvref_conformance.clauses import SpecError
    from kvref_conformance.exceptions import CannotRun
    from kvref_conformance.report.json_file import ResultsError
    from kvref_conformance.runner.expected_failures import ExpectedFailuresError
    from kvref_conformance.testlib.registry import CheckError
    from kvref_conformance.traces.format import TraceError

    try:
        return run(options)
    except BrokenPipeError:
        sys.stderr.close()  # the reader closed the pipe
        return EXIT_CANNOT_RUN
    except OSError as error:
        return _cannot_run(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
    except (CannotRun, SpecError, CheckError, TraceError, ResultsError, ExpectedFailuresError) as error:
        return _cannot_run(str(error))
    except Exception as error:
        return _cannot_run(_crash_report("".join(traceback.format_exception(error))))


def _crash_report(traceback_text: str) -> str:
    """Write the traceback of an error in kvref itself to CRASH_REPORT. Return the line to print."""
    from pathlib import Path

    lines = traceback_text.strip().splitlines()
    places = [line.strip() for line in lines if line.strip().startswith("File ")]
    Path(CRASH_REPORT).parent.mkdir(exist_ok=True)
    Path(CRASH_REPORT).write_text(f"{shlex.join(sys.argv)}\n{traceback_text}", encoding="utf-8")
    where = f" ({places[-1]})" if places else ""
    return f"an error in kvref itself: {lines[-1]}{where}; please report it with {CRASH_REPORT}"


def _cannot_run(why: str) -> int:
    from kvref_conformance.exceptions import printable

    print(f"kvref: {printable(why)}", file=sys.stderr)
    return EXIT_CANNOT_RUN


if __name__ == "__main__":
    sys.exit(main())
