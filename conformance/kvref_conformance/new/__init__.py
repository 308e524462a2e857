"""Writes the files that a new clause, family or third-party adapter needs: `python -m kvref_conformance.new --help`."""
