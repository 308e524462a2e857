"""What things cost: kernels and caches beside memcpy and beside what a user would pick instead, interleaved in one run."""
