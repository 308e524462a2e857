"""A contest: several ways to do the same, timed in turn, each round with a memcpy of the bytes that have to move.

The speed of a machine varies. Only times of the same round are compared, and a ratio is the median of the rounds' ratios.
"""

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import quantiles
from time import perf_counter
from typing import Any

import numpy as np

import kvref

SECONDS = 2.0  # for the rounds of one contest
LEAST_ROUNDS, MOST_ROUNDS = 5, 15
LEAST_SAMPLE = 1e-3  # seconds: shorter operations are repeated within a round
PACKAGES = (
    "numpy",
    "torch",
    "cupy-cuda12x",
    "transformers",
    "torchao",
    "optimum-quanto",
    "compressed-tensors",
    "hqq",
    "gguf",
    "xllamacpp",
    "ml_dtypes",
    "mlx",
    "mlx-lm",
    "vllm",
    "sglang",
)


Spread = tuple[float, float, float]  # median, lower and upper quartile


def memcpy(size: int) -> Callable[[], object]:
    """Return a function that copies `size` bytes: it reads and writes that many."""
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    return lambda: np.copyto(target, source)


@dataclass(frozen=True)
class Machine:
    """Where an entry runs. memcpy: makes a copy of a number of bytes there. wait: synchronizes the device."""

    memcpy: Callable[[int], Callable[[], object]] = memcpy
    wait: Callable[[], object] = lambda: None


HOST = Machine()


@dataclass(frozen=True)
class Contender:
    """One way. label: its displayed name."""

    label: str
    run: Callable[[], object]
    machine: Machine = HOST


@dataclass(frozen=True)
class Comparison:
    """bytes: least number read and written; 0 if no data moves. data: bytes of the float32 input or output; 0
    for whole caches.
    """

    title: str
    shape: str
    bytes: int
    entries: list[Contender]
    data: int = 0


@dataclass(frozen=True)
class Measurement:
    """seconds, and the ratios to a memcpy of the bytes and to a memcpy of the float32 data."""

    who: str
    seconds: Spread
    of_bytes: Spread | None
    of_data: Spread | None


@dataclass(frozen=True)
class ComparisonResult:
    contest: Comparison
    scores: list[Measurement]


def run_comparison(comparison: Comparison) -> ComparisonResult:
    """Time every entry, and the memcpys of the places they run in, in turn, for some rounds."""
    sizes = [size for size in {comparison.bytes // 2, comparison.data} if size]
    copies = [(place, size) for place in {entry.machine for entry in comparison.entries} for size in sizes]
    runs = [(place.memcpy(size), place.wait) for place, size in copies]
    runs += [(entry.run, entry.machine.wait) for entry in comparison.entries]
    repeats = [_repeats(run, wait) for run, wait in runs]
    rounds: list[list[float]] = []
    end = perf_counter() + SECONDS
    while len(rounds) < LEAST_ROUNDS or (perf_counter() < end and len(rounds) < MOST_ROUNDS):
        rounds.append([_time(run, wait, often) for (run, wait), often in zip(runs, repeats, strict=True)])
    columns = list(zip(*rounds, strict=True))
    copied = dict(zip(copies, columns, strict=False))
    scores = []
    for entry, times in zip(comparison.entries, columns[len(copies) :], strict=True):
        moved, data = (copied.get((entry.machine, size)) for size in (comparison.bytes // 2, comparison.data))
        scores.append(
            Measurement(entry.label, _spread(times), moved and _ratio_spread(times, moved), data and _ratio_spread(times, data))
        )
    return ComparisonResult(replace(comparison, entries=[]), scores)  # release the data, which may be gigabytes


def _repeats(run: Callable[[], object], wait: Callable[[], object]) -> int:
    """Return the repetitions needed for LEAST_SAMPLE; the first run, which may compile, is not timed."""
    run(), wait()
    return max(1, int(LEAST_SAMPLE / max(1e-7, _time(run, wait, 1))))


def _time(run: Callable[[], object], wait: Callable[[], object], often: int) -> float:
    start = perf_counter()
    for _ in range(often):
        run()
    wait()
    return (perf_counter() - start) / often


def _ratio_spread(times: Sequence[float], others: Sequence[float]) -> Spread:
    return _spread([mine / other for mine, other in zip(times, others, strict=True)])


def _spread(values: Sequence[float]) -> Spread:
    low, middle, high = quantiles(values, n=4, method="inclusive")
    return middle, low, high


def describe_machine() -> dict[str, Any]:
    """Return a description of the machine."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "kvref": kvref.__version__,
        "packages": dict(_versions()),
    }


def missing_packages() -> list[str]:
    """Return the packages that would take part if they were installed."""
    present = dict(_versions())
    return [package for package in PACKAGES if package not in present]


def _versions() -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            continue


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
