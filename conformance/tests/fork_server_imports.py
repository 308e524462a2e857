"""Modules that the fork server of `commandline` imports before the first command, and the import path that Python used."""

import sys

import hypothesis.stateful
import numpy
import pytest

from kvref_conformance import cli
from kvref_conformance.commands import check, replay, report, vectors
from kvref_conformance.fuzz import hypothesis_runner
from kvref_conformance.runner import subprocess_worker
from kvref_conformance.testlib.registry import all_checks

all_checks()
PATH = sys.path[1:]  # without this folder
__all__ = [
    "PATH",
    "check",
    "cli",
    "hypothesis",
    "hypothesis_runner",
    "numpy",
    "pytest",
    "replay",
    "report",
    "subprocess_worker",
    "vectors",
]
