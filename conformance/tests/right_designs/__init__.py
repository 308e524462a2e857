"""Correct caches of unusual designs, written from the specification alone: the judge must not fail any of them.

They use nothing of `kvref` and nothing of each other but `simple_paged`, so that an assumption that the reference and the judge
share shows up here as a false alarm.
"""
