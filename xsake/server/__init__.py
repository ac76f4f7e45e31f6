"""The server: runs, profiles, plans, masks, results and a model to play with, over HTTP.

    run folders ─────────┐                        ┌─ /api/runs, …/events, …/live
    profiles ────────────┤                        ├─ /api/profiles, …/plan
    benchmarks/results ──┼─ create_app(Settings) ─┼─ /api/results, /api/rows
    a model ─────────────┤                        ├─ /api/play
    the library's masks ─┘                        ├─ /api/masks
                                                  ├─ /metrics (Prometheus), /health
                                                  └─ the pages of web/

Every number is computed by the library or read from a file; `create_app` returns a FastAPI app that
other routes can be added to. docs/server.md describes routes, limits and safety.
"""
