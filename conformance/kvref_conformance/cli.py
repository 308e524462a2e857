"""The `kvref` command: check, soak, search, replay, harness, vectors, report, zoo, bench, canary, list, explain.

Exit codes: 0 conformant, 1 not conformant, 2 not judged, or could not run, 130 interrupted. A user's own mistake costs one clear
line, never a traceback; nor does Ctrl-C, which is why next to nothing is imported before `main` has seen to it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvref_conformance.conversation import interrupts

if TYPE_CHECKING:
    import argparse

EXIT_CANNOT_RUN = 2

_EPILOG = """\
implementations:
  reference         the specification itself, on NumPy
  reference:torch   the same on another Array API library, or strict, jax, cupy
  numpy, ...        a backend of kvref's, or an adapter: `kvref list` shows all
  zoo:MEMBER        one that is wrong on purpose: `kvref zoo` shows all
  module:object     an implementation of yours
  mycache           a program that kvref.toml has a command for:
                    [implementations.mycache]
                    exec = ["./harness", "--flag"]

exit status: 0 conformant (or it breaks what --xfails expects), 1 a clause is
broken, 2 not judged: too little of what it offers, or it could not run,
130 Ctrl-C
"""

_ISOLATE = (
    "run it in a child process, or in this one, for a debugger: what ends the process then ends the judge, with any exit status "
    "and without a word (default: in a child, unless it is kvref's own)"
)

_JOBS = (
    "processes that judge it side by side, each with one of its own (default: 1; of kvref's own, where everything is asked, as "
    "many as there are processors, and at most 4)"
)


def _parser() -> argparse.ArgumentParser:
    import argparse

    from kvref_conformance.conversation.drivers.guard import SERVED_WITHIN, TIMEOUT
    from kvref_conformance.judging.asked import EXAMPLES
    from kvref_conformance.judging.conclusion import LEAST_JUDGED

    patience = f"seconds a call may take ({TIMEOUT:g}; of a server {SERVED_WITHIN:g})"

    parser = argparse.ArgumentParser(prog="kvref", description="Tell whether a KV cache is right, clause by clause.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    check = commands.add_parser(
        "check",
        help="judge an implementation",
        description="Judge an implementation against every clause it has the families for.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    check.add_argument("name", metavar="NAME", nargs="?", help="what to judge (see below)")
    check.add_argument("--exec", metavar="COMMAND", help="judge a program in any language instead: './harness --flag'")
    _server(check)
    check.add_argument("--stderr", action="store_true", help="let through what a program writes to its standard error")
    check.add_argument("--family", metavar="FAMILY", help="only the checks of one family: paged, quantized, ...")
    check.add_argument(
        "--clause", action="append", metavar="CLAUSE", help="only this one, or these: PAGED-07, 'FMT-*'; may be repeated"
    )
    check.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the random inputs (default %(default)s)")
    check.add_argument("--examples", type=int, default=EXAMPLES, metavar="N", help="sequences of calls a family (%(default)s)")
    check.add_argument("--deep", action="store_true", help="many more and longer sequences: half an hour of them")
    check.add_argument("--jobs", type=int, metavar="N", help=_JOBS)
    check.add_argument("--isolate", action=argparse.BooleanOptionalAction, help=_ISOLATE)
    check.add_argument("--timeout", type=float, metavar="S", help=patience)
    check.add_argument(
        "--least-judged", type=float, default=LEAST_JUDGED, metavar="PERCENT",
        help="of the clauses of the families it offers: where fewer are judged, it is 'not judged' (%(default)g)",
    )  # fmt: skip
    check.add_argument("--traces", metavar="DIR", help="keep the conversations that passed, as traces")
    check.add_argument("--slow", action="store_true", help="also the checks that take gigabytes of memory")
    check.add_argument("--real", action="store_true", help="also the larger checks at sizes that models have: a minute of them")
    check.add_argument("--json", metavar="FILE", help="write the results as JSON")
    check.add_argument("--junit", metavar="FILE", help="write the results as JUnit XML")
    check.add_argument("--xfails", metavar="FILE", help="clauses that are expected to fail, one a line")
    check.add_argument("--update-xfails", action="store_true", help="write what fails now to that file")
    check.add_argument("--list", action="store_true", help="list the checks; with a NAME how far they go with what it offers")
    soak = commands.add_parser(
        "soak",
        help="serve requests from an implementation's caches, and look at every token",
        description="Run a serving workload on every kind of cache that an implementation has, at full size: requests that come "
        "and go, are cancelled, share prefixes and run out of room. Each token says where it belongs. Or, with --server, send a "
        "server many requests at once, and hold each word that comes to what the canary must say.",
        epilog="exit status: 0 every token was where it belongs, 1 one was not, or a server failed to answer, 2 nothing could be "
        "judged, 130 Ctrl-C",
    )
    soak.add_argument("name", metavar="NAME", nargs="?", help="the implementation (kvref check --help)")
    soak.add_argument("--exec", metavar="COMMAND", help="a program in any language instead")
    _server(soak)
    soak.add_argument("--minutes", type=float, default=1.0, metavar="N", help="in all, whatever is soaked (%(default)g)")
    soak.add_argument("--concurrency", type=int, metavar="N", help="with --server: requests at once (8)")
    soak.add_argument("--family", metavar="FAMILY", help="only this one: paged, contiguous, ...")
    soak.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the workload (default %(default)s)")
    soak.add_argument("--isolate", action=argparse.BooleanOptionalAction, help=_ISOLATE)
    soak.add_argument("--timeout", type=float, metavar="S", help=patience)
    soak.add_argument("--json", metavar="FILE", help="write the figures as JSON")
    soak.add_argument("--plot", metavar="FILE.svg", help="with --server: draw them over time")
    search = commands.add_parser(
        "search",
        help="search an implementation for failures until the time is over, by all processors",
        description="Search an implementation for failures until the time is over: sequences of calls, the checks of "
        "`kvref check` with other random numbers, those at real sizes too, and short soaks, by many processes. What meets a "
        "new state of the model is gone on from. Each failure is told once, as short as it can be, with a trace like those of "
        "`kvref check`; the next search begins with what this one kept.",
        epilog="exit status: 0 nothing was found, 1 a clause is broken, 2 nothing could be judged, 130 Ctrl-C, which keeps "
        "everything. It takes Dask: in a clone pip install '.[search]'",
    )
    search.add_argument("name", metavar="NAME", nargs="?", help="the implementation (kvref check --help)")
    search.add_argument("--exec", metavar="COMMAND", help="a program in any language instead")
    _server(search)
    search.add_argument("--hours", type=float, metavar="N", help="how long")
    search.add_argument("--minutes", type=float, metavar="N", help="the same in minutes; with --hours, so many more")
    search.add_argument("--workers", type=int, metavar="N", help="processes on this machine (default: as many as processors)")
    search.add_argument("--cluster", metavar="ADDRESS", help="of a Dask scheduler, whose workers work instead: tcp://host:8786")
    search.add_argument("--corpus", metavar="DIR", help="the folder to begin with and to keep (default .kvref/search/NAME)")
    search.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the search (default %(default)s)")
    search.add_argument("--timeout", type=float, metavar="S", help=patience)
    replay = commands.add_parser(
        "replay",
        help="hold a conversation again, and say where it parts from what it must be",
        description="Hold the conversation of a trace again, with the implementation it was made with or with another.",
        epilog="exit status: 0 every reply is as it must be, 1 they part, 2 no call could be made, or it could not run",
    )
    replay.add_argument("trace", metavar="FILE", help="a trace, such as .kvref/failures/PAGED-07-mine.jsonl")
    replay.add_argument("name", metavar="NAME", nargs="?", help="the implementation (default: the one of the trace)")
    replay.add_argument("--exec", metavar="COMMAND", help="a program instead")
    _server(replay)
    replay.add_argument("--isolate", action=argparse.BooleanOptionalAction, help=_ISOLATE)
    replay.add_argument("--timeout", type=float, metavar="S", help=patience)
    report = commands.add_parser(
        "report",
        help="make a page of the results of several runs, or say what changed",
        description="Make a page of results that `kvref check --json` wrote: implementations by chapters and by clauses, with "
        "their traces. Or say what changed since earlier results, or write a failure down as a script.",
        epilog="kvref report new.json --since old.json; kvref report --script .kvref/failures/PAGED-07-mine.jsonl mine:Cache",
    )
    report.add_argument(
        "results", metavar="[NAME=]RESULTS.json", nargs="*", help="NAME: what it is called; with --script: an implementation"
    )
    report.add_argument("-o", "--output", metavar="DIR", help="the folder to write: new, empty, or an older report")
    report.add_argument("--since", metavar="OLD", help="say what changed since these results, a file or a folder of them")
    report.add_argument(
        "--script", metavar="TRACE", help="write a script: the calls of a library that the adapter made for this trace"
    )
    zoo = commands.add_parser(
        "zoo",
        help="judge caches that are wrong on purpose, and show what catches each",
        description="Judge the caches that are wrong on purpose: the clause each breaks, what caught it, in how many calls.",
        epilog="""caught by: a check somebody wrote, a search through any sequence of calls, or both.
exit status: 0 each is caught by the clause it names, 1 one gets through, 2 could not run""",
    )
    zoo.add_argument("names", metavar="MEMBER", nargs="*", help="only these (default: all of them)")
    bench = commands.add_parser(
        "bench",
        help="time kernels and caches beside memcpy and beside others",
        description="Time the kernels of kvref's backends and whole caches, on one core: beside a memcpy of the bytes that have "
        "to move, and beside what a user would pick instead, where it is installed.",
        epilog="Ratios are of the same round; times on their own say little. The whole takes some minutes and 5 GB.",
    )
    bench.add_argument("backends", metavar="BACKEND", nargs="*", help="numpy, torch, torch-compiled, torch:cuda, ... (all here)")
    bench.add_argument("--only", default="*", metavar="GLOB", help="only these contests: 'quantize*', '* 8 x 128'")
    bench.add_argument("--size", type=int, default=64, metavar="MB", help="float32 a kernel is given (%(default)s)")
    bench.add_argument("--json", metavar="FILE", help="write the figures as JSON")
    bench.add_argument("--plot", metavar="FILE.svg", help="draw them")
    _canary(commands)
    harness = commands.add_parser(
        "harness",
        help="test the plumbing of a program that speaks the protocol",
        description="Test the plumbing of a program alone, message by message: whether it greets, makes objects, takes and gives "
        "back what the protocol says. Whether its cache is right is for `kvref check --exec`.",
        epilog="exit status: 0 the plumbing works, 1 it does not, 2 could not run",
    )
    harness.add_argument("--selftest", metavar="COMMAND", required=True, help="the program: './harness --flag'")
    harness.add_argument("--stderr", action="store_true", help="let through what it writes to its standard error")
    harness.add_argument("--timeout", type=float, default=TIMEOUT, metavar="S", help="seconds an answer may take (%(default)g)")
    vectors = commands.add_parser(
        "vectors",
        help="write static test vectors, or hold an implementation against them",
        description="Write a set of static test vectors, made from the reference: conversations with the reply each request must "
        "get, and the formats as safetensors files. Or hold an implementation against such a set.",
        epilog="exit status: 0 written, or every reply as it must be; 1 they part; 2 could not run",
    )
    vectors.add_argument("name", metavar="NAME", nargs="?", help="with --check: the implementation (kvref check --help)")
    vectors.add_argument("-o", "--output", metavar="DIR", help="write a set into this folder, over the one that is there")
    vectors.add_argument("--check", metavar="DIR", help="hold an implementation against the set in this folder")
    vectors.add_argument("--exec", metavar="COMMAND", help="with --check: a program in any language instead")
    vectors.set_defaults(server=None, canary=None, model=None)  # it says tokens, and vectors are of numbers
    vectors.add_argument("--timeout", type=float, default=TIMEOUT, metavar="S", help="seconds a call may take (%(default)g)")
    commands.add_parser("list", help="list the implementations that have a name here, and what is not installed for each")
    explain = commands.add_parser("explain", help="show a clause: its text, why, the bugs it hunts, its checks")
    explain.add_argument("clause", metavar="CLAUSE", help="a clause id such as PAGED-07, or a chapter such as PAGED")
    return parser


def _server(command: argparse.ArgumentParser) -> None:
    command.add_argument("--server", metavar="URL", help="a server like OpenAI's instead: http://127.0.0.1:8000/v1")
    command.add_argument("--canary", metavar="DIR", help="with --server: the canary it has loaded (kvref canary make DIR)")
    command.add_argument("--model", metavar="NAME", help="with --server: what it calls the canary (default: its only model)")


def _canary(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from kvref.canary import Canary
    from kvref_conformance.canary.architectures import ARCHITECTURES
    from kvref_conformance.canary.folder import DTYPES

    canary = commands.add_parser(
        "canary",
        help="make a model whose every token proves which cache entries were read",
        description="A Llama whose weights are made by hand, so that what it says next hangs on single places in its KV cache.",
    ).add_subparsers(dest="subcommand", required=True, metavar="COMMAND")
    make = canary.add_parser(
        "make",
        help="write it as files that engines load",
        description="Write a canary as a folder that engines load as a model of Hugging Face's, and as a GGUF. It says what was "
        "said a period ago; one that recalls says what came behind the last token when it was said before.",
        epilog="exit status: 0 written, 2 could not run",
    )
    make.add_argument("folder", metavar="DIR", help="the folder to write: new, empty, or an older canary's")
    make.add_argument("--gguf", metavar="FILE", help="also as a GGUF for llama.cpp")
    make.add_argument("--architecture", choices=ARCHITECTURES, default="llama", help="of config.json (default %(default)s)")
    make.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the weights (default %(default)s)")
    make.add_argument("--offsets", metavar="N,N", help="how many tokens back each layer looks (default 16,31)")
    make.add_argument("--recalls", action="store_true", help="a last layer that looks places up by what they hold, not how far "
                      "they lie: then --offsets 1 --theta 1e6 --head-dim 128, where nothing else is said")  # fmt: skip
    make.add_argument("--context", type=int, metavar="N", help=f"most tokens it is told and says (default {Canary.context})")
    make.add_argument("--kv-heads", type=int, metavar="N", help=f"(default {Canary.num_kv_heads})")
    make.add_argument("--query-heads", type=int, metavar="N", help=f"(default {Canary.num_query_heads})")
    make.add_argument("--head-dim", type=int, metavar="N", help=f"(default {Canary.head_dim})")
    make.add_argument("--theta", type=float, metavar="X", help=f"base of the rotary positions (default {Canary.theta:g})")
    make.add_argument("--windows", metavar="N,none", help="tokens that each layer sees (default all)")
    make.add_argument("--pairs", metavar="N", type=int, help="of a head, by which it looks back: the more, the finer a ruler "
                      "(default as many as tell places apart best)")  # fmt: skip
    make.add_argument("--intermediate", type=int, metavar="N", help=f"size of the MLP (default {Canary.intermediate_size})")


def main(arguments: Sequence[str] | None = None) -> int:
    interrupts.handle()
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        print("kvref: interrupted", file=sys.stderr)
        return interrupts.EXIT_INTERRUPTED
    finally:
        interrupts.over()


def _run(arguments: Sequence[str] | None) -> int:
    options = _parser().parse_args(arguments)
    try:
        from kvref_conformance.commands import command

        run = command(options.command)
    except ImportError as error:
        return _cannot_run(f"{options.command} needs {error.name} (in a clone: pip install '.[conformance]')")
    from kvref_conformance.checking.registry import CheckError
    from kvref_conformance.clauses import SpecError
    from kvref_conformance.conversation.trace.file import TraceError
    from kvref_conformance.judging.xfails import XfailsError
    from kvref_conformance.outcome import CannotRun
    from kvref_conformance.report.json_file import ResultsError

    try:
        return run(options)
    except BrokenPipeError:
        sys.stderr.close()  # the reader has gone: nothing to say, and no one to say it to
        return EXIT_CANNOT_RUN
    except (CannotRun, SpecError, CheckError, TraceError, ResultsError, XfailsError, OSError) as error:
        return _cannot_run(str(error))


def _cannot_run(why: str) -> int:
    print(f"kvref: {why}", file=sys.stderr)
    return EXIT_CANNOT_RUN


if __name__ == "__main__":
    sys.exit(main())
