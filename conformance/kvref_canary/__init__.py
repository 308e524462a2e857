"""The canary beside its model (kvref.canary): files that engines load, the diagnosis of wrong tokens, and a client of servers."""
