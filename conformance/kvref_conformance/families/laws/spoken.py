"""The laws that the models of all caches can name.

LAW-16 is the subject's, which compares what was handed in with what is left.
"""

OF_CACHES = (
    "LAW-01", "LAW-04", "LAW-05", "LAW-10", "LAW-11", "LAW-12", "LAW-16", "FMT-LEVEL-04",
)  # fmt: skip
