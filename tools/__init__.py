"""Programs that write tables and figures into docs/ from benchmarks/results/."""
