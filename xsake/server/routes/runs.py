"""/api/runs: the list of runs, one run, its config, its events in pages, and live."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, HTTPException, Query
from starlette.responses import Response

from xsake import _files
from xsake.observe.event_log import EventLog, Line, plain
from xsake.server import schemas
from xsake.server.live import Live
from xsake.server.runs import Run
from xsake.server.served import Here, Json, Served, number

router = APIRouter(prefix="/api/runs", tags=["runs"])
START, END = "start", "end"
After = Annotated[str, Query(max_length=64, description="id of an event, or `start`")]


def _summary(
    run: Run, served: Served, results: dict[tuple[str, str], list[str]]
) -> schemas.RunSummary:
    found = served.runs.summary(run)
    hashes = (found.config_hash, found.data_hash)
    return schemas.RunSummary(
        name=run.name,
        state=found.state,
        is_live=run.is_live,
        step=found.step,
        steps=found.steps,
        loss_nats=number(found.loss_nats),
        density_ratio=number(found.density_ratio),
        perplexity={file: number(x) for file, x in found.perplexity.items()},
        checkpoints=list(found.checkpoints),
        plans=found.plans,
        config_hash=found.config_hash,
        data_hash=found.data_hash,
        plan=found.plan,
        commit=found.commit,
        device=found.device,
        has_config=run.config is not None,
        source=run.source,
        results=results.get(hashes, []),
    )


@router.get("", response_model=schemas.RunList)
def list_runs(served: Here) -> Response:
    """All runs: those of the run folders, then those that come with the package."""
    results = served.results.by_hashes()
    found = served.runs.all().values()
    return Json(schemas.RunList(runs=[_summary(run, served, results) for run in found]))


@router.get("/{name}", response_model=schemas.RunSummary)
def get_run(name: str, served: Here) -> Response:
    """One run."""
    return Json(_summary(served.run(name), served, served.results.by_hashes()))


@router.get("/{name}/config", response_model=dict[str, Any])
def get_config(name: str, served: Here) -> Response:
    """The configuration of a run, as its config.json has it."""
    run = served.run(name)
    if run.config is None:
        raise HTTPException(404, f"{name} is a published event log, without a config.json")
    try:
        return Json(_files.read_object(run.config))
    except (ValueError, OSError) as error:
        raise HTTPException(422, f"the config.json of {name} cannot be read: {error}") from error


def _log(run: Run, served: Here) -> EventLog:
    if not run.events.is_file():
        raise HTTPException(404, f"{run.name} has no events yet")
    return served.runs.log(run)


@router.get("/{name}/events", response_model=schemas.EventPage)
def list_events(
    name: str,
    served: Here,
    after: After = START,
    limit: Annotated[int, Query(ge=1)] = 1000,
    points: Annotated[
        int | None, Query(ge=2, description="instead of a page: all events, but so many TrainSteps")
    ] = None,
) -> Response:
    """A page of a run's events, in the order of its file; or all of them, thinned.

    409 if `after` names an event that the file no longer has: the run was resumed from an earlier
    step, and the events are to be fetched again from the start.
    """
    run, limits = served.run(name), served.settings.limits
    log = _log(run, served)
    try:
        begin = 0 if after == START else log.after(after)
        if begin is None:
            raise HTTPException(409, f"there is no event {after!r} in {name} now; start again")
        if points is not None:
            lines = [x for x in log.thinned(min(points, limits.points)) if x.number >= begin]
        else:
            lines = log.lines(begin, begin + min(limit, limits.page))
        total = log.count()
        last = log.lines(total - 1, total) if points is not None else lines[-1:]
    except (ValueError, OSError) as error:
        raise HTTPException(422, f"the events of {name} cannot be read: {error}") from error
    return Json(_page(lines, last, after, total))


def _page(lines: list[Line], last: list[Line], after: str, total: int) -> schemas.EventPage:
    found = [(line, plain(line)) for line in lines if line.text.strip()]
    return schemas.EventPage(
        events=[event for _, event in found if event is not None],
        ids=[line.id for line, event in found if event is not None],
        damaged=[line.number for line, event in found if event is None],
        next=last[0].id if last else after,
        is_end=not last or last[0].number + 1 >= total,
        total=total,
    )


@router.get(
    "/{name}/live",
    response_class=Response,
    responses={
        200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}},
        503: {"description": "too many listeners"},
    },
)
async def listen(
    name: str,
    served: Here,
    after: Annotated[
        str, Query(max_length=64, description="id of an event, `start`, or `end`: only new ones")
    ] = END,
    last_event_id: Annotated[str | None, Header(max_length=64)] = None,
) -> Response:
    """Events of a run as they are written, as server-sent events.

    `id` is that of the event, and a client that reconnects with Last-Event-ID gets what follows. If
    the run was resumed from an earlier step, `event: reset` comes first and all events follow.
    """
    run = served.run(name)
    return Live(served, _log(run, served), last_event_id or after)
