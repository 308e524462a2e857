"""Benchmarks of kernels and caches against memcpy and against the alternatives of a user, interleaved in one run."""
