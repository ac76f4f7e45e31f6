"""/api/results: result files and their measurements as rows, JSON or CSV."""

from __future__ import annotations

import csv
import io
from typing import Annotated, Any, Literal

from fastapi import APIRouter, HTTPException, Query
from pydantic import BaseModel, Field
from starlette.responses import Response

from xsake.server import results, schemas
from xsake.server.descriptions import description
from xsake.server.results import Flat
from xsake.server.served import Here, Json, Served

router = APIRouter(prefix="/api", tags=["results"])
MOST_VALUES = 200  # of a text column, to filter by
SOURCES = ("suite", "kind", "variant", "role", "method")  # what a row is about


class RowsIn(BaseModel):
    """Which rows, and how many."""

    result: list[str] = Field([], description="names of result files; default all")
    where: list[str] = Field([], description="COLUMN=VALUE, all of which a row must have")
    contains: str = Field("", max_length=200, description="in some cell of the row")
    density_from: float | None = Field(None, allow_inf_nan=False)
    density_to: float | None = Field(None, allow_inf_nan=False)
    offset: int = Field(0, ge=0, le=1 << 31)
    limit: int = Field(2000, ge=1, le=20_000)
    format: Literal["json", "csv"] = "json"


RowsQuery = Annotated[RowsIn, Query()]


@router.get("/results", response_model=schemas.ResultList)
def list_results(served: Here) -> Response:
    """All result files, newest first."""
    found, damaged = served.results.all()
    paths = served.results.paths()
    listed = []
    for name, content in found.items():
        origin = results.provenance(content)
        rows = list(results.records(content))
        versions = origin.get("versions")
        about = description(name)
        listed.append(
            schemas.ResultSummary(
                name=name,
                date=str(origin.get("date", "")),
                device=results.device(content),
                commit=str(origin.get("commit", "")),
                command=str(origin.get("command", "")),
                versions={str(x): str(y) for x, y in versions.items()}
                if isinstance(versions, dict)
                else {},
                rows=len(rows),
                bytes=results.file_state(paths[name])[0],
                sources=_sources(rows),
                description=about.words,
                density_of=about.density_of,
            )
        )
    listed.sort(key=lambda x: (x.date, x.name), reverse=True)
    return Json(schemas.ResultList(results=listed, unreadable=damaged))


def _sources(rows: list[dict[str, Any]]) -> list[str]:
    for key in SOURCES:
        if found := sorted({str(row[key]) for row in rows if row.get(key) is not None}):
            return found[:MOST_VALUES]
    return []


@router.get("/results/{name}", response_model=dict[str, Any])
def get_result(name: str, served: Here) -> Response:
    """A result file as it is; numbers that are not finite are null."""
    return Json(
        _content(name, served),
        headers={"content-disposition": f'inline; filename="{_ascii(name)}.json"'},
    )


def _ascii(name: str) -> str:
    return "".join(x if x.isascii() and (x.isalnum() or x in "-_.") else "_" for x in name)


def _content(name: str, served: Served) -> dict[str, Any]:
    try:
        return served.results.load(name)
    except KeyError:
        known = "/api/results lists them"
        raise HTTPException(404, f"there is no result file {name[:80]!r}; {known}") from None
    except (ValueError, OSError) as error:
        raise HTTPException(422, f"{name} cannot be read: {error}") from error


@router.get(
    "/rows",
    response_model=schemas.ResultRows,
    responses={200: {"content": {"text/csv": {"schema": {"type": "string"}}}}},
)
def list_rows(given: RowsQuery, served: Here) -> Response:
    """Measurements of some or all files as flat rows, filtered, as JSON or CSV."""
    conditions = [_condition(x) for x in given.where]
    contents = (
        {name: _content(name, served) for name in given.result}
        if given.result
        else served.results.all()[0]
    )
    found = [
        row
        for name, content in contents.items()
        for row in results.rows(name, content)
        if _matches(row, given, conditions)
    ]
    page = found[given.offset : given.offset + given.limit]
    names = results.columns(page)
    if given.format == "csv":
        return _csv(names, page)
    return Json(
        schemas.ResultRows(columns=names, rows=page, total=len(found), values=_values(found))
    )


def _condition(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign:
        raise HTTPException(422, f"where must be COLUMN=VALUE, got {text[:80]!r}")
    return name, value


def _matches(row: Flat, given: RowsIn, conditions: list[tuple[str, str]]) -> bool:
    if any(name not in row or _shown(row[name]) != value for name, value in conditions):
        return False
    if given.contains and not any(
        given.contains.lower() in _shown(value).lower() for value in row.values()
    ):
        return False
    if given.density_from is None and given.density_to is None:
        return True
    density = next(
        (row[x] for x in ("density_ratio", "realised_density_ratio", "density") if x in row), None
    )
    if not isinstance(density, int | float):
        return False
    low = -1.0 if given.density_from is None else given.density_from
    return low <= density <= (2.0 if given.density_to is None else given.density_to)


def _shown(value: results.Cell) -> str:
    return "" if value is None else str(value)


def _values(rows: list[Flat]) -> dict[str, list[str]]:
    """The values of text columns that have few enough of them to choose from."""
    found: dict[str, set[str]] = {}
    for row in rows:
        for name, value in row.items():
            if isinstance(value, str):
                found.setdefault(name, set()).add(value)
    return {x: sorted(y) for x, y in found.items() if len(y) <= MOST_VALUES}


def _csv(names: list[str], rows: list[Flat]) -> Response:
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\r\n")
    writer.writeheader()
    writer.writerows({name: _safe(value) for name, value in row.items()} for row in rows)
    content = text.getvalue().encode("utf-8", "replace")
    headers = {"content-disposition": 'attachment; filename="xsake-results.csv"'}
    return Response(content, media_type="text/csv; charset=utf-8", headers=headers)


def _safe(value: results.Cell) -> results.Cell:
    """A spreadsheet would take text that begins so as a formula."""
    return f"'{value}" if isinstance(value, str) and value[:1] in "=+-@\t\r" and value else value
