"""The rows of the tables of long-context tasks; `tables` writes them as Markdown."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Iterator
from typing import Any

from xsake.evaluate.needle import LEAST_ACCURACY, summarise

Record = dict[str, Any]
Cells = tuple[list[str], Iterable[list[str]]]  # head, rows


def _spread(value: float, error: float | None, scale: float, digits: int, sign: str = "") -> str:
    shown = f"{scale * value:{sign}.{digits}f}"
    return shown if error is None else f"{shown} ± {scale * error:.{digits}f}"


def accuracy(report: Record) -> Cells:
    """Answers right in % and paired difference to dense in points, by length, density, method."""
    return _by_family(report, "accuracy", 100, 0)


def loss(report: Record) -> Cells:
    """-ln p of the answer in nats per token and paired difference to dense."""
    return _by_family(report, "loss", 1, 2)


def _by_family(report: Record, name: str, scale: float, digits: int) -> Cells:
    rows = report["rows"]
    dense = {(x["length"], x["family"]): x for x in rows if x["method"] == "dense"}
    families = list(dict.fromkeys(x["family"] for x in rows))
    cells = {(x["length"], x["density"], x["method"], x["family"]): x for x in rows}

    def of_dense(length: int, family: str) -> str:
        row = dense.get((length, family))
        if row is None:
            return ""
        left_out = " left out" if row["accuracy"] < LEAST_ACCURACY else ""
        return f"{scale * row[name]:.{digits}f}{left_out}"

    def shown(length: int, density: float, method: str, family: str) -> str:
        row = cells.get((length, density, method, family))
        if row is None:
            return ""
        error = row[f"{name}_difference_standard_error"]
        difference = _spread(row[f"{name}_difference"], error, scale, digits, "+")
        return f"{scale * row[name]:.{digits}f} ({difference})"

    def lines() -> Iterator[list[str]]:
        for length in sorted({x["length"] for x in rows}, reverse=True):
            yield [f"{length:,}", "", "dense", *(of_dense(length, x) for x in families), ""]
            for mean in summarise([x for x in rows if x["length"] == length]):
                point = (length, mean["density"], mean["method"])
                yield [
                    f"{length:,}",
                    f"{mean['density']:g}",
                    mean["method"],
                    *(shown(*point, family) for family in families),
                    f"{mean['share_of_dense']:.3f} of {len(mean['families'])}"
                    if name == "accuracy"
                    else f"{mean['loss_difference']:+.2f}",
                ]

    last = "share of dense, families" if name == "accuracy" else "mean difference"
    return ["tokens", "density", "method", *families, last], lines()


def sign_test(lost: int, won: int) -> float:
    """The two-sided p of `lost` and `won` prompts if both were as likely.

    >>> sign_test(8, 0)
    0.0078125
    """
    n = lost + won
    tail = sum(math.comb(n, i) for i in range(min(lost, won) + 1))
    return min(1.0, 2 * tail / 2**n)


def _lost_and_won(report: Record, mean: Record) -> dict[str, tuple[int, int]]:
    """By family: prompts that only dense attention, and that only the method has right."""
    dense = {
        (x["length"], x["family"]): x["right_by_prompt"]
        for x in report["rows"]
        if x["method"] == "dense"
    }
    point = [mean[x] for x in ("length", "density", "method")]
    return {
        row["family"]: _differing(dense[row["length"], row["family"]], row["right_by_prompt"])
        for row in report["rows"]
        if [row[x] for x in ("length", "density", "method")] == point
        and row["family"] in mean["families"]
    }


def _differing(first: str, second: str) -> tuple[int, int]:
    """Prompts that only the first, and that only the second answers right."""
    pairs = list(zip(first, second, strict=True))
    return pairs.count(("1", "0")), pairs.count(("0", "1"))


def _furthest(report: Record, mean: Record) -> str:
    """The family with the smallest p of losing answers, times the number of families."""
    found = [
        (sign_test(lost, won) if lost > won else 1.0, won - lost, family)
        for family, (lost, won) in _lost_and_won(report, mean).items()
    ]
    p, change, family = min(found)
    count = len(report["rows"][0]["right_by_prompt"])
    return f"{family} {change:+d} of {count}, p = {min(1.0, p * len(found)):.3f}"


# density: (what is compared, its limit) of the floor and of the goal
LIMITS: dict[float, tuple[Any, Any]] = {
    0.1: (None, ("share", 0.80)),
    0.2: (("share", 0.90), ("share", 0.97)),
    0.43: (("points", 2.0), None),
}


def floors(report: Record) -> Cells:
    """Mean over families: right answers of dense attention and of HADS, floors and goals.

    Means of fewer than three families are left out.
    """

    def judged(mean: Record, limit: Any) -> str:
        if limit is None:
            return ""
        kind, least = limit
        if kind == "points":
            limit_text = f"at most {least:g} points below"
            holds = -100 * mean["accuracy_difference"] <= least
        else:
            limit_text, holds = f"at least {least:.2f} of dense", mean["share_of_dense"] >= least
        return f"{limit_text}: {'met' if holds else 'missed'}"

    def lines() -> Iterator[list[str]]:
        for mean in summarise(report["rows"]):
            density = mean["density"]
            hads = mean["method"].startswith(("part_queries", "outlier_queries"))
            if len(mean["families"]) < 3 or not hads or _certified(mean) or density not in LIMITS:
                continue
            error = mean["accuracy_difference_standard_error"]
            yield [
                f"{mean['length']:,}",
                f"{density:g}",
                mean["method"],
                str(len(mean["families"])),
                f"{100 * mean['dense_accuracy']:.1f}",
                _spread(mean["accuracy_difference"], error, 100, 1, "+"),
                f"{mean['share_of_dense']:.3f}",
                _furthest(report, mean),
                *(judged(mean, limit) for limit in LIMITS[density]),
            ]

    head = "tokens | density | method | families | dense, right % | difference, points"
    last = ["share of dense", "family with the smallest p", "floor", "goal"]
    return [*head.split(" | "), *last], lines()


def certified(report: Record) -> Cells:
    """Certified attention beside the same method without: what was visited, and what it answered.

    The first p is that of a sign test over the prompts of all families.
    """
    means = summarise(report["rows"])
    bases = {(x["length"], _uncertified(x["method"])) for x in means if _certified(x)}

    def lines() -> Iterator[list[str]]:
        for mean in means:
            if _certified(mean) or (mean["length"], mean["method"]) in bases:
                error = mean["accuracy_difference_standard_error"]
                lost, won = map(sum, zip(*_lost_and_won(report, mean).values(), strict=True))
                yield [
                    f"{mean['length']:,}",
                    f"{mean['density']:g}",
                    f"{mean['realised_density_ratio']:.2f}",
                    mean["method"],
                    str(len(mean["families"])),
                    _spread(mean["accuracy_difference"], error, 100, 1, "+"),
                    f"{mean['share_of_dense']:.3f}",
                    f"{sign_test(lost, won):.3f}",
                    _furthest(report, mean),
                ]

    head = "tokens | density asked for | visited | method | families | difference, points"
    return [*head.split(" | "), "share of dense", "p", "family with the smallest p"], lines()


# (method, density) and what it is compared with; density None: each that both have
HADS = "outlier_queries/output"
PAIRS: tuple[tuple[str, float | None, str, float | None], ...] = (
    (HADS, None, "oracle/output", None),
    (f"{HADS}, end × 16", None, HADS, None),
    ("outlier_queries/loss", None, HADS, None),
    (f"{HADS}, blocks of 128", None, f"{HADS}, blocks of 64", None),
    # about as fast: docs/certificate.md has the times
    (f"{HADS}, blocks of 128", 0.43, f"{HADS}, blocks of 64", 0.2),
)


def pairs(report: Record) -> Cells:
    """Two methods on the same prompts, on the families that both have and that dense can do.

    p is that of a sign test over the prompts of all families.
    """
    able = {
        (x["length"], x["family"])
        for x in report["rows"]
        if x["method"] == "dense" and x["accuracy"] >= LEAST_ACCURACY
    }
    cells: dict[tuple[int, str, float], dict[str, Record]] = {}
    for row in report["rows"]:
        if (row["length"], row["family"]) in able:
            point = row["length"], row["method"], row["density"]
            cells.setdefault(point, {})[row["family"]] = row
    lengths = sorted({x[0] for x in cells}, reverse=True)
    densities = sorted({x[2] for x in cells})

    def lines() -> Iterator[list[str]]:
        for first, of_first, second, of_second in PAIRS:
            for length in lengths:
                for density in densities if of_first is None else [of_first]:
                    mine = cells.get((length, first, density), {})
                    other = density if of_second is None else of_second
                    theirs = cells.get((length, second, other), {})
                    both = [(mine[x], theirs[x]) for x in mine if x in theirs]
                    if both:
                        named = [first, f"{density:g}", second, f"{other:g}"]
                        yield [f"{length:,}", *named, *_compared(both)]

    head = "tokens | method | density | compared with | density | families | difference, points"
    return [*head.split(" | "), "lost, won", "p", "loss difference"], lines()


def _compared(both: list[tuple[Record, Record]]) -> list[str]:
    """Families, difference of the right answers, prompts lost and won, p, difference of the loss.

    Standard errors are over prompts, which count as independent.
    """
    found = [
        _differing(theirs["right_by_prompt"], mine["right_by_prompt"]) for mine, theirs in both
    ]
    lost, won = map(sum, zip(*found, strict=True))
    count = sum(len(mine["right_by_prompt"]) for mine, _ in both)
    mean = (won - lost) / count
    losses = [
        x - y
        for mine, theirs in both
        for x, y in zip(mine["loss_by_prompt"], theirs["loss_by_prompt"], strict=True)
    ]
    spread = math.sqrt(((won + lost) / count - mean**2) / (count - 1))
    return [
        str(len(both)),
        _spread(mean, spread, 100, 1, "+"),
        f"{lost}, {won}",
        f"{sign_test(lost, won):.3f}",
        _spread(statistics.mean(losses), statistics.stdev(losses) / math.sqrt(count), 1, 3, "+"),
    ]


END = re.compile(r", end × ([\d.e+-]+)(?=, blocks of |$)")


def ends(report: Record) -> Cells:
    """The weights of a prompt's end side by side, on the families that all of them have."""
    means = {(x["length"], x["density"], x["method"]): x for x in summarise(report["rows"])}
    gaps = {(x["length"], x["density"], x["method"]): x for x in report["perplexity"]}
    weighted = [x for x in means if END.search(x[2])]
    points = {(length, density, END.sub("", method)) for length, density, method in weighted}

    def lines() -> Iterator[list[str]]:
        for length, density, plain in sorted(points, reverse=True):
            here = [x[2] for x in means if x[:2] == (length, density)]
            methods = [x for x in here if x == plain or (END.search(x) and END.sub("", x) == plain)]
            shared = set.intersection(
                *(set(means[length, density, x]["families"]) for x in methods)
            )
            kept = [x for x in report["rows"] if x["length"] == length and x["family"] in shared]
            found = [x for x in summarise(kept) if x["density"] == density]
            found = [x for x in found if x["method"] in methods]
            for mean in sorted(found, key=lambda x: _weight(x["method"])):
                error = mean["accuracy_difference_standard_error"]
                gap = gaps.get((length, density, mean["method"]))
                yield [
                    f"{length:,}",
                    f"{density:g}",
                    plain,
                    f"{_weight(mean['method']):g}",
                    str(len(shared)),
                    _spread(mean["accuracy_difference"], error, 100, 1, "+"),
                    f"{mean['share_of_dense']:.3f}",
                    f"{mean['loss_difference']:+.2f}",
                    "" if gap is None else _gap(gap),
                ]

    head = "tokens | density | method | weight of its end | families | difference, points"
    more = ["share of dense", "loss difference", "perplexity gap, %"]
    return [*head.split(" | "), *more], lines()


def _weight(method: str) -> float:
    found = END.search(method)
    return float(found[1]) if found else 1.0


def _gap(row: Record) -> str:
    return _spread(row["perplexity_gap"], row["perplexity_gap_standard_error"], 100, 2)


def _uncertified(method: str) -> str:
    return re.sub(r" certified.*?(?=, blocks of |$)", "", method)


def _certified(mean: Record) -> bool:
    return " certified" in mean["method"]


def depth(report: Record) -> Cells:
    """Answers right in % by depth at the longest length, mean over the families dense can do."""
    rows = report["rows"]
    length = max(x["length"] for x in rows)
    here = [x for x in rows if x["length"] == length]
    able = {x["family"] for x in here if x["method"] == "dense" and x["accuracy"] >= LEAST_ACCURACY}
    here = [x for x in here if x["family"] in able]
    points = {(x["density"], x["method"]) for x in here}
    full = [p for p in points if {x["family"] for x in here if _point(x) == p} == able]
    depths = [x["depth"] for x in here[0]["by_depth"]]

    def lines() -> Iterator[list[str]]:
        for density, method in sorted(full, key=lambda x: (-x[0], x[1])):
            members = [x for x in here if _point(x) == (density, method)]
            means = [
                sum(x["by_depth"][i]["accuracy"] for x in members) / len(members)
                for i in range(len(depths))
            ]
            yield [f"{density:g}", method, *(f"{100 * x:.0f}" for x in means)]

    return ["density", "method", *(f"depth {x:g}" for x in depths)], lines()


def _point(row: Record) -> tuple[float, str]:
    return row["density"], row["method"]


def perplexity(report: Record) -> Cells:
    """Perplexity gap in % of the same methods, a column per density; by length if there are more.

    A cell is empty where the density is below that of the blocks that are always kept.
    """
    found = report["perplexity"]
    densities = sorted({x["density"] for x in found})
    cells = {(x["length"], x["method"], x["density"]): x for x in found}
    lengths = len({x["length"] for x in found}) > 1

    def shown(length: int, method: str, density: float) -> str:
        row = cells.get((length, method, density))
        if row is None:
            return ""
        return _gap(row)

    head = ["tokens"] if lengths else []
    head += ["method", *(f"perplexity gap, % at density {d:g}" for d in densities)]
    return head, (
        [
            *([f"{length:,}"] if lengths else []),
            method,
            *(shown(length, method, density) for density in densities),
        ]
        for length, method in dict.fromkeys((x["length"], x["method"]) for x in found)
    )


def tuning(report: Record) -> Cells:
    """Selectors and budgets at 8,192 tokens and density 0.2, on the families tuned on."""
    found = report["second"]
    gaps = {(x["selector"], x["budgets"]): x for x in found if x["what"] == "perplexity"}
    cells: dict[tuple[str, str], dict[str, Record]] = {}
    for row in found:
        if row["what"] == "tune":
            cells.setdefault((row["selector"], row["budgets"]), {})[row["family"]] = row
    families = list(next(iter(cells.values())))

    def lines() -> Iterator[list[str]]:
        best = next(iter(cells.values()))
        dense = [f"{100 * best[f]['dense']:.0f}, {best[f]['dense_loss']:.2f}" for f in families]
        yield ["dense", "", *dense, "", ""]
        for key, by_family in cells.items():
            answers = [
                f"{100 * by_family[f]['accuracy']:.0f}, {by_family[f]['loss']:.2f}"
                for f in families
            ]
            gap = _spread(gaps[key]["gap"], gaps[key]["error"], 100, 2)
            count = len(by_family[families[-1]]["right"])
            milliseconds = f"{1e3 * by_family[families[-1]]['seconds'] / count:.1f}"
            yield [*key, *answers, gap, milliseconds]

    head = ["selector", "budgets from", *(f"{f}: right %, loss" for f in families)]
    return [*head, "perplexity gap, %", "ms of a forward pass"], lines()


def ranking(report: Record) -> Cells:
    """The same budgets with the selector's ranking and with the true one, on the same prompts."""
    found = report["first"]

    def lines() -> Iterator[list[str]]:
        for true in found:
            if true["what"] != "same budget, true ranking":
                continue
            count = len(true["right"])
            (own,) = (
                x
                for x in found
                if x["what"] == "tune"
                and (x["selector"], x["budgets"]) == ("mean_query", "text")
                and (x["family"], x["length"]) == (true["family"], true["length"])
                and "shared_at_run_time" not in x
            )
            right = own["right"][:count].count("1") / count
            yield [
                true["family"],
                f"{true['length']:,}",
                f"{true['density']:g}",
                str(count),
                *(f"{100 * x:.0f}" for x in (true["dense"], right, true["accuracy"])),
            ]

    head = ["family", "tokens", "density", "prompts", "dense, right %"]
    return [*head, "ranked by mean_query", "ranked by true sensitivity"], lines()


def heads(report: Record, count: int = 10) -> Cells:
    """The heads whose starvation costs the answer most, and the density that they were given."""
    both = {x["how"]: x for x in report["first"] if x["what"] == "heads"}
    starved, given = both["starve"], both["all"]
    shares = [x for row in starved["shares"] for x in row]
    ranked = sorted(shares)
    every = [
        (change, layer, head)
        for layer, row in enumerate(starved["change"])
        for head, change in enumerate(row)
    ]

    def lines() -> Iterator[list[str]]:
        for change, layer, head in sorted(every, reverse=True)[:count]:
            share = starved["shares"][layer][head]
            yield [
                f"{layer}.{head}",
                f"{change:+.3f}",
                f"{given['change'][layer][head]:+.3f}",
                f"{share:.2f}",
                f"{ranked.index(share) + 1} of {len(ranked)}",
            ]

    names = ["head (layer.head)", "loss, this head starved", "loss at 0.2, this head given all"]
    return [*names, "its density at 0.2", "rank from the smallest"], lines()
