"""xsake evaluate --tasks: long-context tasks under a plan, or under methods at equal density."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from rich import box
from rich.table import Column, Table

from xsake.bench import timing
from xsake.cli.progress import progress
from xsake.cli.terminal import console
from xsake.data.tasks import FAMILIES

if TYPE_CHECKING:
    from xsake.data.tasks import Encode
    from xsake.evaluate.needle import MethodsAt
    from xsake.hads import Plan, Profile
    from xsake.model.observer import Observer

METHODS = ("mean_query/output", "sink_window", "oracle/output")


class Chosen(NamedTuple):
    """The flags of `xsake evaluate --tasks`."""

    families: tuple[str, ...]
    lengths: tuple[int, ...]
    prompts: int
    densities: tuple[float, ...]
    methods: tuple[str, ...]
    seed: int
    certify: float | None = None

    def check(self, out: Path, text: list[Path], update: bool) -> None:
        """Raises for flags that cannot be used, before anything is loaded."""
        if update:
            raise ValueError("--update adds perplexity to a plan; leave it out with --tasks")
        if out.suffix == ".md":
            raise ValueError(f"--tasks {out} is the JSON file of the results; name a .json file")
        for name in ("families", "lengths", "densities", "methods"):
            if not getattr(self, name):
                raise ValueError(f"--{name} names none; leave it out for the usual ones")
        for family in self.families:
            if family not in FAMILIES:
                raise ValueError(f"--families {family!r} is not one of {', '.join(FAMILIES)}")
        for density in self.densities:
            if not 0 < density <= 1:
                raise ValueError(f"--densities must be above 0 and at most 1, got {density}")
        for length in self.lengths:
            if length < 2:
                raise ValueError(f"--lengths must be at least 2, got {length}")
        if self.certify is not None and not 0 <= self.certify <= 1:
            raise ValueError(f"--certify is a share of the output, 0 to 1, got {self.certify}")
        if text[0].suffix == ".npy":
            raise ValueError(
                f"--tasks hides words in text, and {text[0]} holds token ids; give --text a text "
                "file"
            )

    def check_context(self, context: int) -> None:
        """Raises for prompts that are longer than the model's context."""
        if max(self.lengths) > context:
            raise ValueError(
                f"--lengths has {max(self.lengths):,}, but the model's context is {context:,} "
                "tokens; give --lengths of that or less"
            )


def measure_tasks(
    subject: Observer,
    encode: Encode | None,
    fillers: list[np.ndarray],
    made: Plan | Profile,
    chosen: Chosen,
    out: Path,
) -> None:
    """Measures a plan or a profile's methods, writes the file and prints a table per length."""
    from xsake import hads
    from xsake.evaluate import needle
    from xsake.hads.profile import check_held_out

    assert encode is not None  # `Chosen.check` refuses token ids
    made.check_model(subject.hash)
    source = made.terms if isinstance(made, hads.Plan) else made.facts
    check_held_out(fillers, source.data_hash)
    densities = (made.terms.density,) if isinstance(made, hads.Plan) else chosen.densities
    settings = needle.Settings(
        chosen.families, chosen.lengths, chosen.prompts, densities, chosen.seed
    )
    with progress(f"{chosen.prompts} prompts for each family and length") as report:
        found = needle.run_tasks(
            subject,
            _methods_at(made, chosen.methods, chosen.certify),
            encode,
            fillers,
            settings,
            source.block,
            out,
            facts={"calibration_data_hash": source.data_hash},
            provenance=timing.provenance(),
            report=report,
        )
    for length in chosen.lengths:
        for table in _tables(found["rows"], length):
            console.print(table)
    for row in found["rows"]:
        if row["method"] == "dense" and row["accuracy"] < needle.LEAST_ACCURACY:
            console.print(
                f"left out: {row['family']} at {row['length']:,} tokens, where dense attention has "
                f"{row['accuracy']:.0%} of the answers (the rule: at least "
                f"{needle.LEAST_ACCURACY:.0%})",
                soft_wrap=True,
            )
    for cell in found["infeasible"]:
        console.print(
            f"left out: density {cell['density']} at {cell['length']:,} tokens, where the blocks "
            "that are always kept are more",
            soft_wrap=True,
        )
    console.print(f"written: {out}", soft_wrap=True)


def _methods_at(
    made: Plan | Profile, names: tuple[str, ...], certify: float | None = None
) -> MethodsAt:
    """The plan itself, or the named methods of a profile; "all" is all that it has curves for.

    With `certify`, methods that select blocks from the input are followed by certified ones.
    """
    from xsake import hads
    from xsake.evaluate import methods

    profile: hads.Profile
    wanted = None if "all" in names else names
    if isinstance(made, hads.Profile):
        profile = made
        if wanted is not None:
            methods.check_names(wanted, {"": profile})

    def methods_at(density: float, length: int) -> list[methods.Method]:
        if isinstance(made, hads.Plan):
            found = [methods.of_plan(made, length)]
        else:
            found = methods.at_density(profile, density, length, names=wanted)
        if certify is not None:
            how = hads.Certify(certify, "error")
            found += [x.certified(how) for x in found if x.kind == "run time"]
        return found

    return methods_at


def _tables(rows: list[dict[str, Any]], length: int) -> list[Table]:
    """Accuracy by family and method, difference to dense; empty if dense can do no family.

    The density is the realised one: certified methods visit more than is asked for.
    """
    from xsake.evaluate.needle import LEAST_ACCURACY, summarise

    here = [row for row in rows if row["length"] == length]
    kept = [
        row["family"]
        for row in here
        if row["method"] == "dense" and row["accuracy"] >= LEAST_ACCURACY
    ]
    if not kept:
        return []
    # as narrow as a terminal of 80 columns
    table = Table(
        Column("at", justify="right"),
        Column("method", no_wrap=True),
        *(Column(x.replace("_", " "), justify="right", overflow="fold") for x in kept),
        Column("mean", justify="right", no_wrap=True),
        title=f"{length:,} tokens: % of answers right; mean difference to dense",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    cells = {(row["density"], row["method"], row["family"]): row for row in here}

    def shown(density: float, method: str, family: str) -> str:
        row = cells.get((density, method, family))
        return "" if row is None else f"{100 * row['accuracy']:.0f}"

    table.add_row("1.00", "dense", *(shown(1.0, "dense", family) for family in kept), "")
    for mean in summarise(here):
        error = mean["accuracy_difference_standard_error"]
        spread = "" if error is None else f" ± {100 * error:.1f}"
        table.add_row(
            f"{mean['realised_density_ratio']:.2f}",
            mean["method"],
            *(shown(mean["density"], mean["method"], family) for family in kept),
            f"{100 * mean['accuracy_difference']:+.1f}{spread}",
        )
    return [table]
