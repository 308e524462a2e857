"""The laws: clauses about every family of caches. Each is checked on all families whose law adapter has what the check uses."""


# The laws that the reference models of all caches can name.
#
# The Subject checks LAW-16 itself: it compares each input array before and after a call.

OF_CACHES = (
    "LAW-01", "LAW-04", "LAW-05", "LAW-10", "LAW-11", "LAW-12", "LAW-16", "FMT-LEVEL-04",
)  # fmt: skip
OF_SAVED_CACHES = ("MOVE-01", "MOVE-04", "MOVE-07")  # of those whose state machine loads what the cache itself saved
