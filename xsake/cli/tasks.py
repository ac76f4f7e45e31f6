"""xsake evaluate --tasks: long-context tasks under a plan, or under methods at equal density."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from xsake.bench import timing
from xsake.cli.progress import progress
from xsake.cli.terminal import console, kept_in
from xsake.data.tasks import FAMILIES

if TYPE_CHECKING:
    from xsake.data.tasks import Encode
    from xsake.evaluate.needle import MethodsAt, Settings
    from xsake.hads import Plan, Profile
    from xsake.model.observer import Observer

LENGTHS, PROMPTS = (2048, 4096, 8192), 100
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
        if self.certify is not None and not 0 <= self.certify < math.inf:
            raise ValueError(f"--certify is a share of the output, at least 0, got {self.certify}")
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


def check_tasks(
    made: Plan | Profile, chosen: Chosen, out: Path, dtype: str, implementation: str | None
) -> None:
    """Raises for methods that cannot be measured, or a file of other settings, before the work."""
    from xsake import hads
    from xsake.evaluate import needle, settings

    if isinstance(made, hads.Plan) and made.terms.top_p is not None:
        raise ValueError(
            "--tasks measures at a known density, and that of a plan with --top-p depends on the "
            "input; give a plan without it, or leave out --tasks to measure the plan on text"
        )
    _methods_at(made, chosen.methods)
    facts = settings.of_run(dtype, implementation) | needle.facts_of(*_settings(made, chosen))
    needle.check_resumable(out, facts | _facts(made))


def _settings(made: Plan | Profile, chosen: Chosen) -> tuple[Settings, int]:
    """(what is measured, the block size)."""
    from xsake import hads
    from xsake.evaluate.needle import Settings

    densities = (made.terms.density,) if isinstance(made, hads.Plan) else chosen.densities
    found = Settings(chosen.families, chosen.lengths, chosen.prompts, densities, chosen.seed)
    return found, (made.terms if isinstance(made, hads.Plan) else made.facts).block


def _facts(made: Plan | Profile) -> dict[str, Any]:
    """What the file records of what is measured."""
    from xsake.evaluate import settings

    source = settings.of_source(made)
    return {"calibration_data_hash": source["calibration_data_hash"], "made_from": source}


def measure_tasks(
    subject: Observer,
    encode: Encode | None,
    fillers: list[np.ndarray],
    made: Plan | Profile,
    chosen: Chosen,
    out: Path,
) -> None:
    """Measures a plan or a profile's methods, writes the file and prints a table per length."""
    from xsake.evaluate import needle
    from xsake.hads.profile import check_held_out

    assert encode is not None  # `Chosen.check` refuses token ids
    made.check_model(subject.hash)
    facts = _facts(made)
    check_held_out(fillers, facts["calibration_data_hash"])
    settings, block = _settings(made, chosen)
    what = f"{chosen.prompts} prompts for each family and length"
    with progress(what) as report, kept_in(out, "the cells"):
        found = needle.run_tasks(
            subject,
            _methods_at(made, chosen.methods, chosen.certify),
            encode,
            fillers,
            settings,
            block,
            out,
            band=facts["made_from"]["band"],
            facts=facts,
            provenance=timing.provenance(),
            report=report,
        )
    for length in chosen.lengths:
        for line in _lines(found["rows"], length):
            console.print(line, markup=False, soft_wrap=True)
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
            f"left out at {cell['length']:,} tokens: {cell['reason']}",
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


def _lines(rows: list[dict[str, Any]], length: int) -> list[str]:
    """Accuracy by family and density, difference to dense; empty if dense can do no family.

    The density is the realised one: certified methods visit more than is asked for. A method's name
    is a line of its own, so that the numbers are within 80 columns.
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
    cells = {(row["density"], row["method"], row["family"]): row for row in here}

    def line(density: str, of_family: Callable[[str], str], mean: str) -> str:
        shown = (f"{of_family(family):>{len(family)}}" for family in kept)
        return f"{density:>9}  {'  '.join(shown)}  {mean:>12}".rstrip()

    def of_method(density: float, method: str) -> Callable[[str], str]:
        def accuracy(family: str) -> str:
            row = cells.get((density, method, family))
            return "" if row is None else f"{100 * row['accuracy']:.0f}"

        return accuracy

    found = [
        "",
        f"{length:,} tokens: % of answers right; mean difference to dense",
        line("density", lambda family: family.replace("_", " "), "mean"),
        "dense",
        line("1.00", of_method(1.0, "dense"), ""),
    ]
    means = sorted(summarise(here), key=lambda mean: (mean["method"], mean["density"]))
    for method, some in itertools.groupby(means, key=lambda mean: mean["method"]):
        found.append(method)
        for mean in some:
            error = mean["accuracy_difference_standard_error"]
            spread = "" if error is None else f" ± {100 * error:.1f}"
            difference = f"{100 * mean['accuracy_difference']:+.1f}{spread}"
            density = f"{mean['realised_density_ratio']:.2f}"
            found.append(line(density, of_method(mean["density"], method), difference))
    return found
