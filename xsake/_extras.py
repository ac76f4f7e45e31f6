"""The optional packages: which module belongs to which extra of `pip install 'xsake[EXTRA]'`.

A command checks that its packages are there before it starts, so that hours of work do not end in
a missing import.
"""

from __future__ import annotations

import importlib.util

# Every module that an extra of pyproject.toml installs and XSAKE imports.
MODULES: dict[str, tuple[str, ...]] = {
    "cli": ("matplotlib", "rich", "tyro"),
    "model": ("flax", "gguf", "safetensors", "tokenizers"),
    "train": ("optax", "orbax.checkpoint", "zstandard"),
    "tensorboard": ("tensorboardX",),
    "serve": ("fastapi", "prometheus_client", "pydantic", "starlette", "uvicorn"),
    "trackio": ("trackio",),
    "wandb": ("wandb",),
    "cuda": ("absl",),
}
INCLUDED = {"train": ("model",), "serve": ("model",)}  # extras that an extra installs too


def require(what: str, extra: str, *modules: str) -> None:
    """Raises ModuleNotFoundError with the command to run, unless all modules are installed.

    Args:
      what: needs them, such as "xsake train".
      extra: one of MODULES.
      modules: of that extra; default all that the extra installs.
    """
    needed = modules or [x for each in (*INCLUDED.get(extra, ()), extra) for x in MODULES[each]]
    if missing := [name for name in needed if not _is_installed(name)]:
        names = " and ".join(filter(None, [", ".join(missing[:-1]), missing[-1]]))
        verb = "is" if len(missing) == 1 else "are"
        raise ModuleNotFoundError(
            f"{what} needs {names}, which {verb} not installed: pip install 'xsake[{extra}]'",
            name=missing[0],
        )


def advice(error: ModuleNotFoundError) -> str:
    """One sentence for a failed import: the extra that installs the module, if there is one."""
    if " needs " in str(error):  # raised by `require`
        return str(error)
    name = error.name or ""
    for extra, modules in MODULES.items():
        if any(name.split(".")[0] == module.split(".")[0] for module in modules):
            return f"{name} is not installed: pip install 'xsake[{extra}]'"
    return f"{error}; it belongs to no extra of xsake: install it with pip"


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that would contain the module
        return False
