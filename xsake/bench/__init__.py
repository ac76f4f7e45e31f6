"""Benchmarks: one list of cases, honest timing, results as JSON with their provenance."""
