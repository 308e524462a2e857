"""The laws: clauses about every family of caches. Each is checked on all families whose Stream class has what the check uses."""
