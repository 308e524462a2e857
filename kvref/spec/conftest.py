"""The examples of the chapters run as tests: pytest collects them through Sybil."""

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

pytest_collect_file = Sybil(parsers=[PythonCodeBlockParser()], pattern="*.md").pytest()
