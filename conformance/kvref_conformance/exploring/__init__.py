"""`kvref search`: the machines, checks and short soaks of one implementation, by many processes, until the time is over."""
