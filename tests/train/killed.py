"""A run that is killed -9 again and again; `python -m tests.train.killed FOLDER STEPS KILLS SEED`.

The parent process imports everything and computes nothing. Every attempt is a fork that trains
until it is killed, at a random time after it has logged a number of further steps. An undisturbed
run, which is a fork too, comes first; test_kill.py compares the two.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import jax

from tests.train.corpus import config, token_file
from xsake.data.tokens import TokenDataset
from xsake.train import loop


def forked(work) -> int:
    """Forks a child that only does this work; returns its process id."""
    if child := os.fork():
        return child
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


def lines(path: Path) -> int:
    return path.read_bytes().count(b'"TrainStep"') if path.exists() else 0


def main(folder: Path, count: int, kills: int, seed: int) -> None:
    """Prints one line per attempt: how many steps were logged when it was killed."""
    jax.config.update("jax_compilation_cache_dir", str(folder / "cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    text = TokenDataset.open(token_file(folder).folder)
    steps = {"schedule__steps": count, "evaluation__files": ()}
    calm = config(folder, text, run__name="calm", **steps)
    assert os.waitpid(forked(lambda: loop.train(calm)), 0)[1] == 0
    stormy = config(folder, text, run__name="stormy", **steps)
    draw = random.Random(seed)
    events, killed = stormy.run_folder / "events.jsonl", 0
    while True:
        child = forked(lambda: loop.train(stormy))
        goal = (killed + 1) * (count - 4) // kills + draw.randint(-1, 1) if killed < kills else None
        status = None
        while goal is not None and lines(events) < goal and status is None:
            found, code = os.waitpid(child, os.WNOHANG)
            status = code if found else None
            time.sleep(0.002)
        if goal is None or status is not None:
            status = os.waitpid(child, 0)[1] if status is None else status
            assert status == 0, status
            print(f"finished after {killed} kills", flush=True)
            return
        time.sleep(draw.random() * 0.05)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        killed += 1
        print(f"killed with {lines(events)} steps logged", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
