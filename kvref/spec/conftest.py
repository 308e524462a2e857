"""The examples of the chapters run as tests: pytest collects them through Sybil."""

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

pytest_collect_file = Sybil(parsers=[PythonCodeBlockParser()], pattern="*.md").pytest()


def pytest_collection_modifyitems(items):
    """A chapter's examples build on each other: one worker runs them all."""
    for item in items:
        if item.path.suffix == ".md":
            item.add_marker(pytest.mark.xdist_group(item.path.name))
