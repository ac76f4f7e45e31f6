"""Programs for the repository itself: tables in docs/ from benchmarks/results/."""
