"""Modules that the fork server of `commandline` imports before the first command, and the import path that Python used."""

import sys

import hypothesis.stateful
import numpy
import pytest

from kvref_conformance import cli
from kvref_conformance.checking.registry import all_checks
from kvref_conformance.commands import check, replay, report, vectors
from kvref_conformance.judging import isolated_child
from kvref_conformance.searching import run

all_checks()
PATH = sys.path[1:]  # without this folder
__all__ = ["PATH", "check", "cli", "hypothesis", "isolated_child", "numpy", "pytest", "replay", "report", "run", "vectors"]
