"""`kvref harness --selftest`: whether a program's plumbing works, before anyone asks whether its cache is right."""
