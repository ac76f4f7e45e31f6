"""xsake serve: the dashboard and its API."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from pathlib import Path

import jax

from xsake.cli.model_path import checkpoint
from xsake.cli.terminal import console
from xsake.parallel.mesh import ONE_DEVICE, MeshSizes


def serve(
    runs: tuple[Path, ...] = (Path("runs"),),
    results: tuple[Path, ...] = (),
    profiles: tuple[Path, ...] = (),
    model: Path = Path("shipped"),
    published: bool = True,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    allow_host: tuple[str, ...] = (),
    warm: bool = True,
    openapi: bool = False,
    mesh: MeshSizes = ONE_DEVICE,
) -> None:
    """Serves runs, profiles, results and a model to play with on http://HOST:PORT.

    Without arguments it serves the runs in runs/ and what comes with the package: a model, its
    profiles and training run, a run with HADS, and the published results.

    Args:
      runs: folders of runs, as `xsake train` makes them; live ones are followed.
      results: folders of result files, as `xsake bench` and `xsake evaluate --table` write them.
      profiles: profiles of `xsake calibrate`, or folders of them.
      model: a checkpoint to play with, or "shipped".
      published: serve what comes with the package too.
      host: address to bind to; any but a loopback address needs a token.
      port: port to bind to; 0 takes a free one.
      token: that every request must carry; default XSAKE_TOKEN, and none if that is not set.
      allow_host: further names of this server, such as that of a proxy in front of it.
      warm: load the model at the start, in the background.
      openapi: print the OpenAPI description of the API as JSON, and stop.
      mesh: devices that share the model: fsdp its parameters, tensor its heads.
    """
    import uvicorn

    from xsake.model import huggingface
    from xsake.model.on_mesh import mesh_for_text
    from xsake.server import openapi as description
    from xsake.server.app import create_app
    from xsake.server.settings import Settings, token_from_environment

    if openapi:
        print(description.text(), end="")
        return
    for flag, paths in (("--results", results), ("--profiles", profiles)):
        for path in paths:
            if not path.exists():
                raise FileNotFoundError(f"{flag} {path} does not exist; name a folder that does")
    for path in runs:
        if path != Path("runs") and not path.exists():
            console.print(f"--runs {path} does not exist yet; its runs show once it does")
    settings = Settings(
        runs=runs,
        results=results,
        profiles=profiles,
        model=checkpoint(model),
        published=published,
        host=host,
        port=port,
        token=token or token_from_environment(),
        hosts=allow_host,
        mesh=mesh,
    )
    opened = huggingface.examine(settings.model)
    opened.tokenizer()  # raises for a model that cannot be served
    mesh_for_text(opened.config, mesh)  # likewise
    _keep_compiled()
    listener = _bound(host, port)
    name, number = listener.getsockname()[:2]
    shown = f"[{name}]" if ":" in name else name
    console.print(f"serving on http://{shown}:{number} (Ctrl-C stops)", soft_wrap=True)
    if settings.token is not None:
        console.print("open it once with ?token=… to let a browser in", soft_wrap=True)
    config = uvicorn.Config(
        create_app(settings, warm=warm),
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=2,  # streams of live events would keep it open
    )
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])
    console.print("stopped")
    # A thread may still be in XLA, which cannot be interrupted: the interpreter must not take the
    # modules apart under it.
    sys.stdout.flush()
    os._exit(0)


def _keep_compiled() -> None:
    """Lets JAX keep compiled programs in the user's cache for the next start, if it can be made."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "xsake" / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        console.print(f"compiled programs are not kept: {error}", style="dim", markup=False)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))


def _bound(host: str, port: int) -> socket.socket:
    """A listening socket, so that a taken port is one sentence and port 0 is known."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(
            f"--host {host} --port {port} cannot be bound: {error.strerror or error}; "
            "name another port, or 0 for a free one"
        ) from error
    return listener
