"""Settings of a server, and its limits."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
from pathlib import Path

from xsake import shipped
from xsake.parallel.mesh import ONE_DEVICE, MeshSizes

STATIC = Path(__file__).parent / "static"  # the built pages: `make web` writes them


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one request, or all of them together, may use."""

    body_bytes: int = 256 << 10  # of a request
    text_characters: int = 20_000  # of a text for the model
    model_calls: int = 1  # calls of the model that run at a time
    model_waiting: int = 16  # calls that wait for their turn; more are answered with 503
    texts: int = 8  # texts whose activations are kept
    text_bytes: int = 1 << 30  # of these: 17 MB a text at 2,048 tokens, 8 heads, 8 layers
    listeners: int = 256  # open streams of live events
    page: int = 5000  # events of a page
    points: int = 5000  # TrainSteps of a thinned list
    logs: int = 32  # event files whose index is kept
    blocks: int = 256  # blocks of a mask on each side
    heads: int = 64  # of a mask
    send_seconds: float = 30.0  # a listener that takes longer to read what was sent is dropped


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is served, where, and to whom.

    Attributes:
      runs: folders that contain run folders; those that do not exist yet are looked for again.
      results: folders of result files.
      profiles: profiles, or folders of them.
      model: a checkpoint for the page Play.
      published: serve the package's own training run, event logs, results and profiles too.
      host: address to bind to; another than a loopback address needs a token.
      port: to bind to.
      token: that a request must carry; None: none.
      hosts: further names that a request's Host may have, such as that of a proxy.
      static: folder of the built pages.
      limits: of requests.
      mesh: devices that share the model.
    """

    runs: tuple[Path, ...] = ()
    results: tuple[Path, ...] = ()
    profiles: tuple[Path, ...] = ()
    model: Path = shipped.FOLDER
    published: bool = True
    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None
    hosts: tuple[str, ...] = ()
    static: Path = STATIC
    limits: Limits = Limits()
    mesh: MeshSizes = ONE_DEVICE

    def __post_init__(self) -> None:
        if self.token is not None and (len(self.token) < 16 or not self.token.isascii()):
            raise ValueError(
                f"the token has {len(self.token)} characters; give at least 16 ASCII ones, such as "
                "the output of: python -c 'import secrets; print(secrets.token_urlsafe())'"
            )
        if self.token is None and not is_loopback(self.host):
            raise ValueError(
                f"--host {self.host} is reachable from other machines and needs a token: set "
                "--token or XSAKE_TOKEN, or bind to 127.0.0.1"
            )
        if not 0 <= self.port < 65536:
            raise ValueError(f"--port must be from 0 to 65535, got {self.port}")

    @property
    def hosts_allowed(self) -> frozenset[str]:
        """Names that the Host of a request may have, without a port."""
        own = {"localhost", "127.0.0.1", "[::1]"}
        if not is_any(self.host):
            own.add(f"[{self.host}]" if ":" in self.host else self.host.lower())
        return frozenset(own | {name.lower() for name in self.hosts})


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_any(host: str) -> bool:
    """Whether an address means all addresses of the machine."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host == ""


def token_from_environment() -> str | None:
    """XSAKE_TOKEN, so that the token need not be on a command line."""
    return os.environ.get("XSAKE_TOKEN") or None
