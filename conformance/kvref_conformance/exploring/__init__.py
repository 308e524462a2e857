"""`kvref search`: the machines, real sizes and short soaks of one implementation, by many processes, until the time is over."""
