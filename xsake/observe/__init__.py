"""Events of training runs, the sinks that they are written to, and the list of runs."""
