"""Watch: notices that another process died or hangs, and ends this one with one message.

    every process   ─ beat: "17" ─────────────┐ once a second
                                              ▼
    process 0       compares the beats: who has been silent for lost_seconds? ─ verdict
                                              │
    other processes ◄─ verdict, or process 0 itself does not answer ─ message, exit 75

    slow step       process 0 asks: who was silent, or reported that others waited for it?

The beats are keys of JAX's coordination service, which runs in process 0. A process that waits for
a dead one in a collective operation cannot be interrupted, therefore it is ended from a thread. If
process 0 dies, JAX aborts the others at once; a handler of SIGABRT then writes the message.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax

from xsake import _jax

EXIT_CODE = 75  # EX_TEMPFAIL: start the run again
ERROR_CODE = 1  # of a process that raised
BEAT = "xsake/beat/"
VERDICT = "xsake/verdict/"
LATE = "xsake/late/"
SUSPECT_SECONDS = 5.0  # silence that suffices after a collective operation has failed
INTERVAL = 1.0
NOTICED = 2 * INTERVAL  # silence or delay that is more than the interval of beats


class Watch:
    """Watches the other processes until `close`; nothing with one process.

    Args:
      lost_seconds: silence after which a process counts as lost.
      position: says where a restart resumes: "newest checkpoint: step 50 of runs/x".
      on_lost: called with the reason in process 0, before it ends.
    """

    def __init__(
        self,
        lost_seconds: float,
        position: Callable[[], str],
        on_lost: Callable[[str], None] | None = None,
    ) -> None:
        self._limit, self._position, self.on_lost = lost_seconds, position, on_lost
        self._client = _jax.coordination_client()
        self._count = 0 if self._client is None else jax.process_count()
        self._me = jax.process_index() if self._count else 0
        self._closed = threading.Event()
        self._ending = threading.Lock()
        now = time.monotonic()
        self._answered = now  # when the coordinator last answered
        self._heard = dict.fromkeys(range(self._count), now)
        self._beats: dict[int, str] = {}
        self._gaps: dict[int, tuple[float, float]] = {}  # silence before the last beat, its end
        if self._count > 1:
            self._abort = _on_abort(self._aborted)
            for work in (self._pulse, self._judge):
                threading.Thread(target=work, name=f"xsake {work.__name__}", daemon=True).start()

    # ------------------------------------------------------------------------------- called outside

    def close(self) -> None:
        """Says goodbye: this process ends as planned."""
        if self._count > 1 and not self._closed.is_set():
            self._closed.set()
            signal.signal(signal.SIGABRT, signal.SIG_DFL)
            self._client.key_value_set(f"{BEAT}{self._me}", "done", allow_overwrite=True)

    def fail(self, error: Exception) -> None:
        """Ends this process and all others because of an error; returns with one process.

        If a collective operation failed, another process may be the cause: then the verdict on it
        ends this process first.
        """
        if self._count < 2:
            return
        if _jax.is_collective_failure(error):
            self._limit = min(self._limit, SUSPECT_SECONDS)
            time.sleep(self._limit + 4 * INTERVAL)
        traceback.print_exception(error)
        reason = f"process {self._me} of {self._count} raised {type(error).__name__}: {error}"
        self._announce(reason, ERROR_CODE)

    def report_late(self, step: int, seconds: float) -> None:
        """This process kept the others waiting for so long before it began a step."""
        if self._count > 1 and seconds > NOTICED:
            text = f"{step} {seconds}"
            self._client.key_value_set(f"{LATE}{self._me}", text, allow_overwrite=True)

    def slowest(self, step: int, seconds: float) -> int | None:
        """The process that a slow step waited for, as far as it shows; called in process 0.

        Args:
          step: the one that was slow.
          seconds: that it took. A process was silent in this time, or has reported a delay; slow
            devices and links do not show.
        """
        if self._count < 2:
            return None
        now, found = time.monotonic(), {}
        for process in range(self._count):
            gap, end = self._gaps.get(process, (0.0, now))
            silence = now - self._heard[process]
            found[process] = max(silence, gap if now - end < seconds else 0.0)
        late = {}
        for key, text in self._client.key_value_dir_get(LATE):
            late_step, delay = text.split()
            if abs(int(late_step) - step) <= 2:
                late[int(key.rpartition("/")[2])] = float(delay)
        return waited_for(found, late)

    # -------------------------------------------------------------------------------------- threads

    def _pulse(self) -> None:
        """Beats and listens; blocks in the client if the coordinator does not answer."""
        number = 0
        while not self._closed.is_set():
            number += 1
            try:
                self._client.key_value_set(f"{BEAT}{self._me}", str(number), allow_overwrite=True)
                verdicts = self._client.key_value_dir_get(VERDICT)
                beats = self._client.key_value_dir_get(BEAT) if self._me == 0 else []
            except Exception as error:  # whatever the client raises, it has no answer
                if _jax.is_collective_failure(error):
                    self._closed.wait(INTERVAL)
                    continue
                raise
            self._answered = time.monotonic()
            if verdicts:
                self._end(verdicts[0][1])
            for key, beat in beats:
                process = int(key.rpartition("/")[2])
                if self._beats.get(process) != beat:
                    self._beats[process] = beat
                    self._gaps[process] = self._answered - self._heard[process], self._answered
                    self._heard[process] = self._answered
            self._closed.wait(INTERVAL)

    def _judge(self) -> None:
        """Compares the ages of what was heard with the limit."""
        while not self._closed.wait(INTERVAL / 2):
            now, limit = time.monotonic(), self._limit
            if self._me and now - self._answered > limit:
                self._end(_silent("process 0, the coordinator,", self._count, limit))
            for process in range(1, self._count if self._me == 0 else 0):
                is_done = self._beats.get(process) == "done"
                if not is_done and now - self._heard[process] > limit:
                    self._announce(_silent(f"process {process}", self._count, limit))

    def _aborted(self) -> None:
        self._end(f"process 0 of {self._count}, the coordinator, is gone, and JAX aborts this one")

    def _announce(self, reason: str, code: int = EXIT_CODE) -> None:
        """Ends all processes; this one last, because it may have the coordination service."""
        with self._ending:  # so that this process does not end by its own verdict
            if self._closed.is_set():
                return
            self._client.key_value_set(f"{VERDICT}{self._me}", reason, allow_overwrite=True)
            time.sleep(3 * INTERVAL)
            self._report_and_exit(reason, code)

    def _end(self, reason: str) -> None:
        with self._ending:
            if not self._closed.is_set():
                self._report_and_exit(reason, EXIT_CODE)

    def _report_and_exit(self, reason: str, code: int) -> None:
        """Ends this process, whatever the log, the run's folder and stderr raise."""
        try:
            try:
                if self.on_lost is not None and self._me == 0:
                    self.on_lost(reason)
            finally:
                sys.stderr.write(
                    f"\nxsake: {reason}; process {self._me} ends. {self._where()}. Run the same "
                    "command again, with any number of processes, to resume.\n"
                )
                sys.stderr.flush()
        finally:
            os._exit(code)

    def _where(self) -> str:
        try:
            return self._position()
        except Exception as error:  # whatever it is, the reason is still to be reported
            return f"The newest checkpoint is not known ({error})"


def waited_for(silence: dict[int, float], late: dict[int, float]) -> int | None:
    """The process that was silent or late for longest, in seconds; None if none is noticed.

    Process 0 hears the others: while it stands still, all seem silent.

    >>> waited_for({0: 0.4, 1: 7.0, 2: 1.1}, {}), waited_for({0: 7.0, 1: 7.4}, {})
    (1, 0)
    >>> waited_for({0: 0.4, 1: 0.9}, {0: 3.0}), waited_for({0: 0.4, 1: 0.9}, {})
    (0, None)
    """
    if silence[0] > NOTICED:
        return 0
    found = {process: max(x, late.get(process, 0.0)) for process, x in silence.items()}
    slowest = max(found, key=lambda process: found[process])
    return slowest if found[slowest] > NOTICED else None


def _silent(who: str, count: int, seconds: float) -> str:
    return f"{who} of {count} has died or hangs: it has been silent for {seconds:.0f} s"


def _on_abort(call: Callable[[], None]) -> Any:
    """Has abort() call a function first; returns what must be kept alive.

    Python's own handlers run in the main thread only, which may be waiting. abort() is called by a
    thread of the runtime on its own behalf, so that this handler interrupts nothing.
    """
    kind = ctypes.CFUNCTYPE(None, ctypes.c_int)
    handler = kind(lambda _: call())
    set_handler = ctypes.CDLL(None).signal
    set_handler.argtypes, set_handler.restype = (ctypes.c_int, kind), ctypes.c_void_p
    set_handler(int(signal.SIGABRT), handler)
    return handler
