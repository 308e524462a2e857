"""`kvref harness --selftest`: tests how a program speaks the protocol, before its cache is judged."""

import argparse
import shlex
from pathlib import Path

from rich.console import Console
from rich.text import Text

from kvref_conformance.exceptions import CannotRun
from kvref_conformance.runner.harness_selftest import run_selftest


def test_harness(options: argparse.Namespace) -> int:
    try:
        command = shlex.split(options.selftest)
    except ValueError as error:
        raise CannotRun(f"--selftest {options.selftest}: {error}") from None
    if not command:
        raise CannotRun("--selftest: expected a program and its arguments, got nothing")
    console, done, wrong, declined = Console(highlight=False), 0, 0, list[str]()
    for said in run_selftest(command, Path.cwd(), options.stderr, options.timeout):
        if said.declined:
            declined.append(said.what)
            console.print(Text(f"  - {said.what}: not offered", style="dim"), soft_wrap=True)
            continue
        done += 1
        wrong += bool(said.wrong)
        console.print(Text(f"  {'✗' if said.wrong else '✓'} {said.what}", style="red" if said.wrong else ""), soft_wrap=True)
        if said.wrong:
            console.print(Text(f"      {said.wrong}"), soft_wrap=True)
    if wrong:
        console.print(Text(f"the protocol is broken: {wrong} of {done} tests failed", style="bold red"))
        return 1
    conclusion = f"the protocol works: {done} of {done} tests passed, {len(declined)} operations not offered"
    console.print(Text(conclusion, style="bold green"))
    console.print(f"to judge the cache: kvref check --exec {shlex.quote(options.selftest)}", soft_wrap=True)
    return 0
