"""Profiles by name; plans made from them, with what the profile estimates and what was measured."""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from pathlib import Path
from typing import Any

import numpy as np

from xsake import shipped
from xsake.evaluate import methods
from xsake.hads import Plan, Profile, budget, row_blocks
from xsake.server.results import file_state
from xsake.server.runs import is_inside
from xsake.server.settings import Settings

# What scoring a pair of blocks costs, ÷ the cost of q · kᵀ: the docstrings of `block_scores`.
SCORING = {
    "static": lambda block: 0.0,
    "pooled": lambda block: 1 / block**2,
    "antidiagonal": lambda block: 1 / math.gcd(16, block),
    "gaussian": lambda block: 2 / (block * math.gcd(4, block)),
    "mean_query": lambda block: 1 / block,
    "past_query": lambda block: 1 / block,
    "part_queries": lambda block: math.gcd(16, block) / block,
    "outlier_queries": lambda block: math.gcd(16, block) / block,
    "every_query": lambda block: 1.0,
}
QK_SHARE = 0.5  # q · kᵀ is half of the products of attention
NEAR = 0.005  # densities of a plan and of a measurement that are taken as equal


class Profiles:
    """The profiles of a server; a file is read when it is asked for, and again if it changed."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._lock = threading.Lock()
        self._loaded: dict[Path, tuple[tuple[int, int], Profile]] = {}

    def paths(self) -> dict[str, Path]:
        """Profiles by name; those that the user named first, then those of the package."""
        named: list[Path] = []
        for path in self.settings.profiles:
            inside = (x for x in sorted(path.glob("*.safetensors")) if is_inside(x, path))
            named += inside if path.is_dir() else [path]
        if self.settings.published:
            named += shipped.PROFILES
        found: dict[str, Path] = {}
        for path in named:
            found.setdefault(path.stem, path)
        return found

    def load(self, name: str) -> Profile:
        """The profile of a name; KeyError if there is none, ValueError if it is damaged."""
        paths = self.paths()
        path = paths[name]
        with self._lock:
            for gone in self._loaded.keys() - set(paths.values()):
                del self._loaded[gone]
            try:
                found = file_state(path)
            except OSError as error:
                raise ValueError(f"{path.name} cannot be read: {error.strerror}") from error
            if path not in self._loaded or self._loaded[path][0] != found:
                self._loaded.pop(path, None)  # also if the new file is damaged
                self._loaded[path] = (found, Profile.load(path))
            return self._loaded[path][1]

    def all(self) -> dict[str, Profile]:
        """Every profile that can be read; a folder may hold plans too."""
        found = {}
        for name in self.paths():
            try:
                found[name] = self.load(name)
            except ValueError:
                if name in {path.stem for path in self.settings.profiles if path.is_file()}:
                    raise  # the user named this file
        return found

    def python_path(self, name: str) -> str:
        """How a script names the profile's file."""
        path = self.paths()[name]
        if path in shipped.PROFILES:
            return f"shipped.PROFILES[{shipped.PROFILES.index(path)}]"
        return repr(str(path))


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a profile says of a plan; None where it has no curve or no such length."""

    kl: float | None
    output_error: float | None
    recall: float | None
    note: str


def estimate(profile: Profile, plan: Plan) -> Estimate:
    """Costs of the plan's counts by the curves that were measured on the calibration text."""
    counts = np.asarray(plan.counts)
    n, most, selector = counts.shape[-1], profile.size[2], plan.terms.selector
    if n > most:
        note = f"the profile has texts of {profile.facts.length:,} tokens: no estimate beyond that"
        return Estimate(None, None, None, note)

    def at_counts(curve: np.ndarray) -> np.ndarray:
        return np.take_along_axis(curve[..., :n, :], counts[..., None] - 1, -1)[..., 0]

    kept = np.exp(-at_counts(budget.surrogate(profile.statistics.mass, profile.facts.band)))
    recall = float(kept.mean())
    if selector not in profile.statistics.cost["kl"]:
        note = f"the profile has no cost curves for {selector}: only the mass of the best blocks"
        return Estimate(None, None, recall, note)
    kl = float(at_counts(profile.cost("kl", selector)).mean())
    error = at_counts(profile.cost("output", selector)).mean(-1).sum(-1)  # by layer
    note = (
        "from the calibration text: KL and output error of the blocks that the selector ranks "
        "highest, errors of heads added as if independent; mass of the best blocks by mean mass"
    )
    if plan.terms.top_p is not None:
        note += "; of the plan without top_p, which visits fewer blocks and loses more"
    return Estimate(kl, float(np.sqrt(error.mean())), recall, note)


def cost_ratio(plan: Plan) -> float:
    """Products of attention and of block selection ÷ those of dense causal attention.

    With top_p it is an upper limit: a row block may visit fewer blocks than its count.
    """
    return plan.density + QK_SHARE * SCORING[plan.terms.selector](plan.terms.block)


def measured(tables: dict[str, dict[str, Any]], plan: Plan, length: int) -> list[dict[str, Any]]:
    """Rows of published tables with the plan's model, block, method, density and length.

    None with top_p, which visits fewer blocks than the counts: tables have no such methods.
    """
    if plan.terms.top_p is not None:
        return []
    wanted = (plan.terms.model_hash, plan.terms.block, length)
    found = []
    for name, table in tables.items():
        if tuple(table.get(x) for x in ("model_hash", "block", "length")) != wanted:
            continue
        for part in table["densities"].values():
            for row in part["rows"]:
                is_near = abs(row["realised_density_ratio"] - plan.density) <= NEAR
                if is_near and row["method"] == methods.name_of(plan):
                    found.append({"result": name, **row})
    return found


def plan_python(path: str, plan: Plan, length: int | None) -> str:
    """A script that makes the same plan and saves it."""
    terms = plan.terms
    lines = ["from xsake import hads, shipped" if "shipped." in path else "from xsake import hads"]
    options = "".join(
        f", {name}={value}"
        for name, value in (
            ("top_p", terms.top_p),
            ("end_weight", None if terms.end_weight == 1 else terms.end_weight),
            ("length", length),
        )
        if value is not None
    )
    how = f"{terms.policy!r}, {terms.selector!r}"
    lines += [
        "",
        f"profile = hads.Profile.load({path})",
        f"plan = hads.make(profile, {terms.density}, {how}{options})",
        'plan.save("plan.safetensors")',
        "print(plan)",
    ]
    return "\n".join(lines) + "\n"


@functools.lru_cache(maxsize=64)
def least_density(length: int, block: int, band: int = 0) -> float:
    """The density of the forced blocks of a text."""
    return row_blocks.least_density(row_blocks.count_blocks(length, block), band)
