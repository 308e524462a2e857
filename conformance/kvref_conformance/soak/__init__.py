"""`kvref soak`: a cache under a serving workload, at full size, for any length of time."""
