"""What the commands do, one module a command; `cli` reads the arguments."""

import argparse

from kvref_conformance.commands import bench, check, explain, harness, replay, report, soak, vectors, zoo


def run(options: argparse.Namespace) -> int:
    """Returns the exit code. Raises what the command line turns into one line: CannotRun and the like."""
    return {
        "check": check.check,
        "bench": bench.bench,
        "soak": soak.soak_implementation,
        "replay": replay.replay_trace,
        "harness": harness.harness,
        "vectors": vectors.vectors,
        "report": report.report,
        "zoo": zoo.show_zoo,
        "list": explain.list_implementations,
        "explain": explain.explain,
    }[options.command](options)
