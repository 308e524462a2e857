"""`kvref search`: runs state machines, checks and short soaks of one implementation in many processes, for a given time."""
