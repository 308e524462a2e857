"""The judge: reports which clauses of the specification an implementation of a KV cache breaks.

`clauses` reads the specification. `families` contains the checks of each kind of cache, written with the helpers in `checking`.
`oracle` computes the expected results and shares no code with kvref. `call_trace` makes and records the calls, `judging` runs
the checks, `searching` and `exploring` generate random call sequences, `report` shows results. `implementations` contains
adapters for third-party caches. `plugin` is the pytest plugin, `cli` the `kvref` command.
"""
