"""Runs: the folders of a run root, and the event logs that come with the package.

A run is found by its name in a list, never by a path made from a request. A folder or a file that a
symbolic link leads out of its root is not listed.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path

from xsake import shipped
from xsake.observe import event_log, registry
from xsake.observe.event_log import EventLog
from xsake.observe.events import Event
from xsake.observe.metrics import Newest
from xsake.server.settings import Settings


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that is served."""

    name: str
    events: Path
    config: Path | None  # None: the log of a published run, without one
    folder: Path | None = None  # None: not a run folder, and never live
    source: str = ""  # of a published run: what it belongs to

    @property
    def is_live(self) -> bool:
        """Whether a process trains in its folder."""
        return self.folder is not None and registry.is_live(self.folder)


def is_inside(path: Path, root: Path) -> bool:
    """Whether a path, with symbolic links resolved, lies in `root`."""
    try:
        return path.resolve(strict=True).is_relative_to(root.resolve(strict=True))
    except (OSError, RuntimeError):  # it does not exist, or links form a loop
        return False


def published() -> Iterator[Run]:
    """The runs that come with the package: that of the shipped model, and the benchmarks'."""
    yield Run(
        "shipped",
        shipped.FOLDER / "events.jsonl",
        shipped.FOLDER / "training.json",
        source="the shipped model's training run",
    )
    for path in sorted(shipped.RESULTS.glob("*/*.jsonl")):
        folder = path.parent.name
        yield Run(f"{folder}.{path.stem}", path, None, source=f"benchmarks/results/{folder}.json")


class Runs:
    """The runs of a server, by name; a run folder wins over a published run of its name."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._logs: collections.OrderedDict[Path, EventLog] = collections.OrderedDict()
        self._newest: dict[str, Newest] = {}
        self._read: dict[Path, tuple[tuple[int, int, int], list[Event]]] = {}

    def all(self) -> dict[str, Run]:
        """Every run, looked for again at each call."""
        found: dict[str, Run] = {}
        for root in self.settings.runs:
            if not root.is_dir():
                continue  # `xsake train` will make it
            for config in sorted(root.glob("*/config.json")):
                folder = config.parent
                paths = (folder, config, folder / "events.jsonl")
                if all(is_inside(path, root) for path in paths if path.exists()):
                    found.setdefault(
                        folder.name, Run(folder.name, folder / "events.jsonl", config, folder)
                    )
        if self.settings.published:
            for run in published():
                found.setdefault(run.name, run)
        return found

    def find(self, name: str) -> Run | None:
        """The run of a name."""
        return self.all().get(name)

    def log(self, run: Run) -> EventLog:
        """The index of a run's events; those that were used last are kept."""
        with self._lock:
            log = self._logs.pop(run.events, None)
            log = EventLog(run.events) if log is None else log
            self._logs[run.events] = log
            while len(self._logs) > self.settings.limits.logs:
                self._logs.popitem(last=False)
            return log

    def summary(self, run: Run) -> registry.Summary:
        """The state of a run, from the two ends of its events."""
        if run.folder is not None:
            return registry.summarised(run.folder, self._ends)
        try:
            return registry.of_events(run.name, self._ends(run.events))
        except (ValueError, OSError) as error:
            return registry.Summary(run.name, state=str(error))

    def _ends(self, path: Path) -> list[Event]:
        """`event_log.newest`, read again only when the file has changed."""
        found = path.stat()
        state = (found.st_ino, found.st_size, found.st_mtime_ns)
        with self._lock:
            known = self._read.get(path)
        if known is None or known[0] != state:
            known = (state, event_log.newest(path))
            with self._lock:
                self._read[path] = known
        return known[1]

    def newest(self) -> dict[str, Newest]:
        """The newest numbers of every run that can be read, for /metrics; counters never fall."""
        found = {}
        for name, run in self.all().items():
            if not run.events.exists():
                continue
            try:
                events = self._ends(run.events)
            except (ValueError, OSError):  # /api/runs says of this run that it is damaged
                continue
            with self._lock:
                known = self._newest.setdefault(name, Newest())
                for event in events:
                    known.write(event)
            found[name] = known
        return found
