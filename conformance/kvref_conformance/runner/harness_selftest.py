"""The selftest of a harness: tests its messages (hello, making objects, arguments, replies, errors) against the protocol.

It does not test whether results are correct; `kvref check` does.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvref_conformance.calls.operation_table import operations
from kvref_conformance.calls.proxy import ObjectProxy
from kvref_conformance.calls.subject import Subject
from kvref_conformance.drivers.json_client import HelloError, JsonClient
from kvref_conformance.drivers.resource_limits import CallTimeouts, TimedOut, time_limit
from kvref_conformance.exceptions import CallTimeout, ClauseViolation, NotOffered
from kvref_conformance.families import all_families
from kvref_conformance.implementation_api import offers
from kvref_conformance.limits import Limits
from kvref_conformance.runner.capabilities import row_width, sample_calls_of, was_executed
from kvref_conformance.testlib.sample_calls import ResultByName, args, operation_of

SMALL_ROWS, LARGE_ROWS = 5, 4096  # numbers per row; large rows make lines of more than a hundred kilobytes


@dataclass(frozen=True)
class SelftestResult:
    """The result of one test. what: the test. wrong: the problem, "" if there is none. declined: the operation is not offered."""

    what: str
    wrong: str = ""
    declined: bool = False


def run_selftest(command: Sequence[str], folder: Path, show_stderr: bool, timeout: float) -> Iterator[SelftestResult]:
    """Run all tests of a program. Raises FileNotFoundError if there is no such program."""
    try:
        program = JsonClient(command, folder, show_stderr)
    except HelloError as wrong:
        yield SelftestResult("hello", str(wrong).removeprefix("hello: "))
        return
    families = [family for family in all_families() if offers(program, family)]
    about = f"{program.name} {program.version} ({program.language}, {program.level})"
    yield SelftestResult(f"hello: {about}, {', '.join(families)}", "" if families else "expected at least one family, got none")
    yield _test_error(program, timeout, "nobody.knows", {}, "NotOffered", "an unknown operation")
    for family in families:
        small, *large = dict.fromkeys(_row_width(program, family, dim) for dim in (SMALL_ROWS, LARGE_ROWS))
        for dim in (small, *(large if family != "blocks" else ())):  # blocks contain no numbers
            yield from _test_family(Subject(program, np.random.default_rng(0), CallTimeouts(timeout), family), dim, dim == small)
        for name, value in all_families()[family].small.items():
            if not isinstance(value, str):
                config = _small_config(program, family, SMALL_ROWS) | {name: -1}
                yield _test_error(program, timeout, f"{family}.new", config, "ConfigError", f"{family}.new with {name} -1")
    yield _test_reset(program, timeout, families)
    yield _test_exit("bye: the program ends with exit code 0", program.close())
    yield _test_exit(
        "end of input: the program ends with exit code 0", JsonClient(command, folder, show_stderr).close(politely=False)
    )


def _test_exit(what: str, code: int | None) -> SelftestResult:
    return SelftestResult(
        what, "the program did not end, and was killed" if code is None else f"exit code {code}" if code else ""
    )


def _test_family(subject: Subject, dim: int, small: bool) -> Iterator[SelftestResult]:
    """Test each operation of one family. With large rows, success is reported once for the family."""
    well = True
    for said in _test_operations(subject, dim):
        well = well and not said.wrong
        if small or said.wrong:
            yield said if small else SelftestResult(f"{said.what}, with rows of {dim} numbers", said.wrong)
    if well and not small:
        yield SelftestResult(f"{subject.family}: all operations with rows of {dim} numbers")


def _test_operations(subject: Subject, dim: int) -> Iterator[SelftestResult]:
    family, objects, got = subject.family, dict[str, int](), ResultByName()
    config = _small_config(subject.implementation, family, dim)
    for step, arguments in [(f"{family}.new", args(**config)), *sample_calls_of(subject, config, dim).items()]:
        op = operation_of(step)
        try:
            given, on = arguments(got), None if op.endswith(".new") else objects[op.partition(".")[0]]
            got[step] = subject.call(op, on, given)
        except KeyError:
            continue  # an argument is the result of a declined operation
        except NotOffered:
            yield SelftestResult(op, declined=True)
            continue
        except ClauseViolation as violation:
            yield SelftestResult(op, f"expected {violation.expected}, got {violation.got}")
            if isinstance(violation, CallTimeout):
                return  # the program has ended
            continue
        except Exception as error:
            yield SelftestResult(op, f"expected a result, got the error {type(error).__name__}: {error}")
            continue
        if not was_executed(subject, op):
            yield SelftestResult(op, declined=True)  # the judge derived it
            continue
        if isinstance(got[step], ObjectProxy):
            objects[family if op.endswith(".new") else "buffer"] = got[step].id
        yield SelftestResult(step)


def _test_error(program: JsonClient, timeout: float, op: str, args: dict[str, Any], kind: str, what: str) -> SelftestResult:
    """Test that an invalid request gets an error of this kind."""
    program.send_hello()
    came = _call_outcome(program, timeout, op, None, args)
    return SelftestResult(
        f"{what}: error {kind}", "" if came == f"the error {kind}" else f"expected the error {kind}, got {came}"
    )


def _test_reset(program: JsonClient, timeout: float, families: list[str]) -> SelftestResult:
    """Test that a second "hello" removes all objects."""
    what = "second hello: earlier objects no longer exist"
    for family in families:
        looks = [name for name, operation in operations(family).items() if operation.attribute]
        if (
            looks
            and _call_outcome(program, timeout, f"{family}.new", None, _small_config(program, family, SMALL_ROWS)) == "a result"
        ):
            program.send_hello()
            came = _call_outcome(program, timeout, f"{family}.{looks[0]}", 1, {})
            return SelftestResult(
                what, "" if came.startswith("the error") else f"call on an earlier object: expected an error, got {came}"
            )
    return SelftestResult(what)


def _call_outcome(program: JsonClient, timeout: float, op: str, on: int | None, args: dict[str, Any]) -> str:
    try:
        with time_limit(timeout):
            program.call(op, on, args)
    except TimedOut as late:
        return late.got
    except NotOffered:
        return "the error NotOffered"
    except ClauseViolation as violation:
        return violation.got
    except Exception as error:
        return f"the error {type(error).__name__}"
    return "a result"


def _row_width(program: Any, family: str, dim: int) -> int:
    """The number of numbers per row that is nearest to `dim` within the limits."""
    found: int = _small_config(program, family, dim).get("head_dim") or row_width(
        Limits(program.limits, program.formats), family, dim
    )
    return found


def _small_config(program: Any, family: str, dim: int) -> dict[str, Any]:
    """Small sizes within the limits, in supported formats, with rows of `dim` numbers if the family allows it."""
    record, limits = all_families()[family], Limits(program.limits, program.formats)
    config = dict(record.small)
    for name, among in record.formats.items():
        taken = [each for each in (config[name], *among) if limits.allows_format(family, name, each)]
        config[name] = next(iter(taken), config[name])
    wide = config | ({"head_dim": dim} if "head_dim" in config else {})
    config = wide if record.together(wide) else config
    return config | limits.sizes(record, config)
