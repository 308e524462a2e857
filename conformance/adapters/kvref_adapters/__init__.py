"""Adapters with which kvref judges third-party projects: one folder per project.

A folder contains

- the adapter modules. Entry points of the group `kvref.implementations` (`pyproject.toml`) give them names for `kvref check`.
- `install.txt`: the commands that install the project, in order.
- `findings.md`: what the judge found, and which clauses fail and why.
- `reproduce_*`: scripts that show the findings, most of them with the project alone.

An adapter translates names, shapes and exceptions. It does not validate arguments for the library and does not repair results.
A canary model in an engine makes wrong reads of keys and values visible. `_shared` contains helpers of several adapters.
"""

__version__ = "0.1.0"
