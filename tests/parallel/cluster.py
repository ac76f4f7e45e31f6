"""Real processes on this machine, which train together; a process of its own for each.

    python -m tests.parallel.cluster FOLDER NAME ID COUNT PORT DEVICES STEPS MESH

is one of them, with DEVICES virtual CPU devices. `Cluster` starts them all. XSAKE_TEST_LOST and
XSAKE_TEST_CHECKPOINT have other `processes.lost_seconds` and `checkpoint.every`, XSAKE_TEST_STOP
has `run.stop_at`; XSAKE_TEST_OTHER has the JSON of settings that all processes but the first have:
{"data__rows": 4}.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOST_SECONDS = 6.0


class Cluster:
    """`count` processes that train the run `name` in a folder which has a dataset `text`."""

    def __init__(
        self, folder: Path, name: str, count: int, steps: int, mesh: str, devices: int = 1
    ):
        self.folder, self.events = folder, folder / name / "events.jsonl"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        self.logs = [folder / f"{name}-{number}.log" for number in range(count)]
        self.processes = []
        for number, log in enumerate(self.logs):
            arguments = (folder, name, number, count, port, devices, steps, mesh)
            with log.open("w") as out:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "tests.parallel.cluster", *map(str, arguments)],
                        cwd=ROOT,
                        env=environment,
                        stdout=out,
                        stderr=subprocess.STDOUT,
                    )
                )

    def steps(self) -> int:
        """How many steps are logged."""
        return self.events.read_bytes().count(b'"TrainStep"') if self.events.exists() else 0

    def wait_for_step(self, step: int, seconds: float = 240) -> None:
        end = time.monotonic() + seconds
        while self.steps() < step:
            ended = [i for i, process in enumerate(self.processes) if process.poll() is not None]
            if ended or time.monotonic() > end:
                raise AssertionError(
                    f"step {step} was not reached: {self.text(ended[0] if ended else 0)}"
                )
            time.sleep(0.05)

    def signal(self, number: int, kind: signal.Signals) -> None:
        self.processes[number].send_signal(kind)

    def codes(self, seconds: float, left_out: int | None = None) -> list[int | None]:
        """The exit codes of all processes but one, which have so much time to end."""
        end = time.monotonic() + seconds
        found: list[int | None] = []
        for number, process in enumerate(self.processes):
            if number == left_out:
                continue
            try:
                found.append(process.wait(max(0.1, end - time.monotonic())))
            except subprocess.TimeoutExpired:
                found.append(None)
        return found

    def text(self, number: int) -> str:
        return self.logs[number].read_text()[-3000:]

    def kill(self) -> None:
        """Ends what is left of them."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def main(arguments: list[str]) -> None:
    folder, name = Path(arguments[0]), arguments[1]
    number, count, port, devices, steps = map(int, arguments[2:7])
    flags = f"--xla_force_host_platform_device_count={devices}"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"

    import jax

    from tests.train.corpus import changed, config
    from xsake.data.tokens import TokenDataset
    from xsake.observe.sinks import Terminal
    from xsake.parallel.mesh import parse
    from xsake.parallel.processes import Processes
    from xsake.train import loop

    jax.config.update("jax_compilation_cache_dir", str(folder / "cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    text = TokenDataset.open(folder / "text")
    lost_seconds = float(os.environ.get("XSAKE_TEST_LOST", LOST_SECONDS))
    whole = config(
        folder,
        text,
        data__rows=8,
        schedule__steps=steps,
        hads__density=None,
        evaluation__every=steps,
        checkpoint__every=int(os.environ.get("XSAKE_TEST_CHECKPOINT", "4")),
        run__name=name,
        run__stop_at=int(os.environ.get("XSAKE_TEST_STOP", "0")),
        mesh=parse(arguments[7]),
        processes=Processes(f"127.0.0.1:{port}", count, number, lost_seconds=lost_seconds),
    )
    if number:
        others = json.loads(os.environ.get("XSAKE_TEST_OTHER", "{}"))
        others = {x: tuple(y) if isinstance(y, list) else y for x, y in others.items()}
        whole = changed(whole, **others)
    outcome = loop.train(whole, Terminal(steps))
    print(f"{outcome.reason} at step {outcome.step}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
