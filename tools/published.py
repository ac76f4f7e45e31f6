"""Writes the HADS table that comes with the package: `python -m tools.published`.

benchmarks/results/hads-64-….json ─ perplexity of every method ─ xsake/shipped/smollm2-hads.json

The result file is too large for a wheel. The excerpt keeps the perplexity gaps, by document too, so
that `xsake demo` can show the published comparison; it is never edited by hand, and a test compares
it with the result file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from xsake import shipped
from xsake.evaluate.table import to_json

RESULT = Path("benchmarks/results/hads-64-2026-11-15.json")
GAP = "perplexity_gap"
FIELDS = (
    *("method", "kind", "realised_density_ratio"),
    *(GAP, f"{GAP}_standard_error", f"{GAP}_by_document"),
)


def excerpt(table: dict[str, Any], name: str) -> dict[str, Any]:
    """The perplexity gaps of a table that `xsake evaluate --table` wrote to the file `name`."""
    facts = ("schema", "model_hash", "length", "documents", "block", "calibration")
    origin = ("date", "machine", "versions", "commit", "command", "model", "dtype", "sources")
    return {
        "source": name,
        **{key: table[key] for key in facts},
        "provenance": {key: table["provenance"][key] for key in origin},
        "densities": {
            density: {"rows": [{key: row[key] for key in FIELDS} for row in part["rows"]]}
            for density, part in sorted(table["densities"].items(), key=lambda x: float(x[0]))
        },
    }


def main() -> None:
    """Writes the excerpt of RESULT."""
    table = json.loads(RESULT.read_text())
    shipped.PUBLISHED.write_text(to_json(excerpt(table, RESULT.as_posix())))
    print(f"written: {shipped.PUBLISHED}")


if __name__ == "__main__":
    main()
