"""`kvref soak`: a cache under a serving workload, at full size, for as long as one likes."""
