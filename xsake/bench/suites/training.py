"""Compares finished training runs: `python -m xsake.bench.suites.training RUN… --out FILE`.

    runs/dense-0 ─┐                ┌─ FILE.json       a record per run: perplexity of each file, its
    runs/hads-0  ─┼─ events ───────┤                  gap to the first run, at the end and by step
    runs/dense-1 ─┘                └─ FILE/RUN.jsonl  the run's events, subsampled

All runs are compared with the first one. A run with the same settings and another seed shows how
much of a gap is noise.
"""

from __future__ import annotations

import datetime
import json
import statistics
from pathlib import Path

from xsake import _files
from xsake.bench import programs
from xsake.bench.suites import Record
from xsake.observe import sinks
from xsake.observe.events import Evaluated, PlanSwapped, RunStarted, Stopped, TrainStep
from xsake.observe.excerpt import write_excerpt


def record_of(run: Path) -> Record:
    """Final metrics of a finished run, and its perplexity by file and step."""
    path = run / "events.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"{run} is not the folder of a run: there is no {path}")
    events = sinks.read(path)
    began = next((event for event in events if isinstance(event, RunStarted)), None)
    if began is None:
        raise ValueError(f"{path} has no start of a run; name the folder of a finished run")
    last = events[-1]
    if not isinstance(last, Stopped) or last.reason != "finished":
        raise ValueError(
            f"{run} is at step {last.step} of {began.steps}; finish it before comparing it"
        )
    steps = [event for event in events if isinstance(event, TrainStep)]
    curves: dict[str, dict[int, float | None]] = {}
    for event in events:
        if isinstance(event, Evaluated):
            curves.setdefault(event.file, {})[event.step] = event.perplexity
    kinds = {"seed": int, "model": dict, "hads": dict}
    settings = _files.read_record(run / "config.json", "the configuration of a run", kinds)
    sparse = [event for event in steps if event.density_ratio < 1] or steps
    return {
        "run": run.name,
        "commit": began.commit,
        "config_hash": began.config_hash,
        "data_hash": began.data_hash,
        "seed": settings["seed"],
        "attention": settings["model"].get("attention", "dense"),
        "hads": settings["hads"],
        "parameters": began.parameters,
        "steps": began.steps,
        "tokens_seen": steps[-1].tokens_seen,
        "plans": sum(isinstance(event, PlanSwapped) for event in events),
        "density_ratio": steps[-1].density_ratio,
        "visited_density_ratio": steps[-1].visited_density_ratio,
        "skipped_steps": steps[-1].skipped_steps,
        "median_tokens_per_second": statistics.median(x.tokens_per_second for x in sparse),
        "perplexity": {file: curve[max(curve)] for file, curve in curves.items()},
        "perplexity_by_step": {
            file: [[step, curve[step]] for step in sorted(curve)] for file, curve in curves.items()
        },
    }


def with_gaps(records: list[Record]) -> list[Record]:
    """Adds perplexity_gap and perplexity_gap_by_step against the first record."""
    first = records[0]
    for record in records:
        if (record["data_hash"], record["steps"]) != (first["data_hash"], first["steps"]):
            raise ValueError(
                f"{record['run']} has other data or another number of steps than {first['run']}; "
                "compare runs that differ in seed and hads only"
            )
        record["perplexity_gap"] = {
            file: value / first["perplexity"][file] - 1
            for file, value in record["perplexity"].items()
        }
        record["perplexity_gap_by_step"] = {
            file: [
                [step, value / other - 1]
                for (step, value), (_, other) in zip(
                    curve, first["perplexity_by_step"][file], strict=True
                )
            ]
            for file, curve in record["perplexity_by_step"].items()
        }
    return records


def write(runs: list[Path], out: Path, every: int, command: str) -> None:
    """Writes the comparison with the first run's machine and versions, and the event excerpts."""
    records = with_gaps([record_of(run) for run in runs])
    began = sinks.read(runs[0] / "events.jsonl")[0]
    assert isinstance(began, RunStarted)
    when = datetime.datetime.fromtimestamp(began.time_unix_seconds, datetime.UTC)
    report = {
        "date": when.isoformat(timespec="seconds"),
        "machine": {"device": began.device},
        "versions": began.versions,
        "commit": began.commit,
        "command": command,
        "results": records,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    folder = out.with_suffix("")
    folder.mkdir(exist_ok=True)
    for run in runs:
        write_excerpt(run, folder / f"{run.name}.jsonl", every)


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line."""
    parser = programs.parser("xsake.bench.suites.training", __doc__)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of finished runs")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument(
        "--every",
        type=int,
        default=100,
        help="steps between the TrainStep events that are kept; default: %(default)s",
    )
    given = parser.parse_args(arguments)
    names = " ".join(run.name for run in given.runs)
    command = f"python -m xsake.bench.suites.training {names} --out {given.out.name}"
    with programs.stopping():
        write(given.runs, given.out, given.every, command)


if __name__ == "__main__":
    main()
