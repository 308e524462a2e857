"""The judge: reports which clauses of the specification an implementation of a KV cache breaks.

`clauses` reads the specification. `families` contains the checks of each kind of cache, written with `testlib`. `oracle` computes
the expected results and shares no code with kvref. `calls`, `drivers` and `traces` make, record and replay calls, `runner` runs
the checks, `fuzz` generates random call sequences, `report` shows results. `implementations` finds implementations by name.
`pytest_plugin` is the pytest plugin, `cli` the `kvref` command, `new` the scaffold of clauses, families and adapters.
"""
