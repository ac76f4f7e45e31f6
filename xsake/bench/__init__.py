"""Benchmarks: from cases to JSON files with provenance.

    cases ── suites/NAME.parts ─┬─ checks    no time is recorded for a wrong result
                                ├─ timing    rounds, median, provenance
                                ├─ peers     other libraries, in the same process
                                └─ run.run_suite ─ benchmarks/results/NAME-DATE.json ─ tools/tables

`xsake bench --suite NAME` runs the suites that run.SUITES lists. The other modules in suites/ are
programs: python -m xsake.bench.suites.NAME.
"""
