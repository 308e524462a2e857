"""The judge: tells any implementation of a KV cache which clause of the specification it breaks.

`clauses` reads the specification; `checks` holds what each clause demands; `checking` is what they are written with; `oracle`
says what is right, sharing no code with kvref; `drivers` reach an implementation; `implementations` are adapters; `judge` runs
one check; `plugin` makes pytest the engine; `cli` is the `kvref` command.
"""
