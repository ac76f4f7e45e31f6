"""/api/profiles: profiles, their heads, and plans made from them."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from fastapi import APIRouter, HTTPException, Path, Query
from pydantic import BaseModel, Field
from starlette.responses import Response

from xsake.hads import Plan, Profile, budget, make
from xsake.hads.statistics import DENSITIES, SELECTORS
from xsake.hads.terms import END_WEIGHTS
from xsake.server import profiles, schemas
from xsake.server.served import Here, Json, Served, asked, number, numbers

router = APIRouter(prefix="/api/profiles", tags=["profiles"])
MAX_LENGTH = 1 << 17  # tokens of a plan
MAX_ROW_BLOCKS = 2048  # of a plan: it is sent with a count for each


class PlanIn(BaseModel):
    """What a plan is made with, as `xsake.hads.make` takes it."""

    density: float = Field(gt=0, le=1, allow_inf_nan=False)
    policy: Literal["uniform", "entropy", "kl", "output", "loss"] = "output"
    selector: Literal[
        "static",
        "pooled",
        "antidiagonal",
        "gaussian",
        "mean_query",
        "past_query",
        "part_queries",
        "outlier_queries",
        "every_query",
    ] = "mean_query"
    length: int | None = Field(None, ge=1, le=MAX_LENGTH, description="default the profile's")
    top_p: float | None = Field(
        None,
        gt=0,
        le=1,
        allow_inf_nan=False,
        description="row blocks may stop below their count, so that cost and density are at most "
        "those of the answer",
    )
    end_weight: float = Field(
        1.0,
        ge=END_WEIGHTS[0],
        le=END_WEIGHTS[1],
        allow_inf_nan=False,
        description="weight of the last two row blocks in the budget; the others have 1",
    )


PlanQuery = Annotated[PlanIn, Query()]
Number = Annotated[int, Path(ge=0, lt=1 << 16)]


def _profile(name: str, served: Served) -> Profile:
    try:
        return served.profiles.load(name)
    except KeyError:
        known = "; /api/profiles lists them"
        raise HTTPException(404, f"there is no profile {name[:80]!r}{known}") from None
    except ValueError as error:
        raise HTTPException(422, str(error)) from error


def _check_head(name: str, profile: Profile, layer: int, head: int) -> None:
    layers, heads, _ = profile.size
    if layer >= layers or head >= heads:
        raise HTTPException(404, f"{name} has {layers} layers of {heads} heads")


def _summary(name: str, profile: Profile, served: Served) -> schemas.ProfileSummary:
    layers, heads, n = profile.size
    facts = profile.facts
    return schemas.ProfileSummary(
        name=name,
        layers=layers,
        heads=heads,
        row_blocks=n,
        length=facts.length,
        block=facts.block,
        band=facts.band,
        documents=facts.documents,
        model_hash=facts.model_hash,
        data_hash=facts.data_hash,
        selectors=[x for x in SELECTORS if x in profile.statistics.cost["kl"]],
        policies=[x for x in budget.POLICIES if x != "loss" or x in profile.statistics.cost],
        least_density_ratio=profiles.least_density(facts.length, facts.block, facts.band),
        is_of_model=facts.model_hash == served.model_hash,
    )


@router.get("", response_model=schemas.ProfileList)
def list_profiles(served: Here) -> Response:
    """All profiles."""
    with asked():
        found = served.profiles.all()
    listed = [_summary(name, profile, served) for name, profile in found.items()]
    return Json(schemas.ProfileList(profiles=listed))


@router.get("/{name}", response_model=schemas.ProfileFigures)
def get_profile(name: str, served: Here) -> Response:
    """Entropies and retained-mass curves of every head."""
    profile = _profile(name, served)
    statistics = profile.statistics
    error = profile.errors.get("entropy")
    path = served.profiles.python_path(name)
    imports = "from xsake import hads" + (", shipped" if "shipped." in path else "")
    return Json(
        schemas.ProfileFigures(
            summary=_summary(name, profile, served),
            entropy=numbers(statistics.entropy),
            entropy_error=None if error is None else numbers(error),
            block_entropy=numbers(statistics.block_entropy),
            densities=DENSITIES.tolist(),
            retained=numbers(statistics.retained),
            retained_mean=numbers(np.asarray(statistics.retained).mean((0, 1))),
            agreement={x: number(y) for x, y in profile.agreement().items()},
            python=f"{imports}\n\nprofile = hads.Profile.load({path})\n"
            "print(profile.statistics.entropy)\n",
        )
    )


@router.get("/{name}/heads/{layer}/{head}", response_model=schemas.HeadFigures)
def get_head(
    name: str,
    layer: Number,
    head: Number,
    served: Here,
) -> Response:
    """One head: its attention mass by block."""
    profile = _profile(name, served)
    _check_head(name, profile, layer, head)
    statistics = profile.statistics
    return Json(
        schemas.HeadFigures(
            layer=layer,
            head=head,
            entropy=number(statistics.entropy[layer, head]),
            block_entropy=number(statistics.block_entropy[layer, head]),
            mass=numbers(statistics.mass[layer, head]),
            sensitivity=numbers(statistics.sensitivity[layer, head]),
            retained=numbers(statistics.retained[layer, head]),
            densities=DENSITIES.tolist(),
        )
    )


def _plan(profile: Profile, given: PlanIn) -> Plan:
    length = given.length or profile.facts.length
    if length > MAX_ROW_BLOCKS * profile.facts.block:
        raise ValueError(
            f"length {length:,} has more than {MAX_ROW_BLOCKS:,} row blocks of "
            f"{profile.facts.block} tokens; ask for a shorter one"
        )
    return make(profile, **given.model_dump())


@router.get("/{name}/plan", response_model=schemas.PlanFigures)
async def get_plan(name: str, given: PlanQuery, served: Here) -> Response:
    """A plan: budgets of every head, its cost and its quality, estimated and measured."""
    profile = _profile(name, served)
    return Json(await served.compute(_plan_figures, name, profile, given, served))


def _plan_figures(
    name: str, profile: Profile, given: PlanIn, served: Served
) -> schemas.PlanFigures:
    plan = _plan(profile, given)
    terms, counts = plan.terms, np.asarray(plan.counts)
    layers, heads, n = counts.shape
    guess = profiles.estimate(profile, plan)
    length = given.length or profile.facts.length
    return schemas.PlanFigures(
        profile=name,
        policy=terms.policy,
        selector=terms.selector,
        length=length,
        block=terms.block,
        requested_density_ratio=terms.density,
        density_ratio=plan.density,
        least_density_ratio=profiles.least_density(length, terms.block, terms.band),
        shares=numbers(plan.shares),
        counts=counts.tolist(),
        visited_blocks=int(counts.sum()),
        causal_blocks=layers * heads * n * (n + 1) // 2,
        cost_ratio=profiles.cost_ratio(plan),
        estimated_kl=number(guess.kl),
        estimated_output_error=number(guess.output_error),
        estimated_recall=number(guess.recall),
        estimate_note=guess.note,
        notes=list(terms.notes),
        measured=[
            schemas.Measured(
                result=row["result"],
                method=row["method"],
                density_ratio=number(row.get("realised_density_ratio")),
                kl=number(row.get("kl")),
                recall=number(row.get("recall")),
                output_error=number(row.get("error")),
                logit_kl=number(row.get("logit_kl")),
                perplexity_gap=number(row.get("perplexity_gap")),
                perplexity_gap_standard_error=number(row.get("perplexity_gap_standard_error")),
            )
            for row in profiles.measured(served.results.tables(), plan, length)
        ],
        python=profiles.plan_python(served.profiles.python_path(name), plan, given.length),
    )


@router.get("/{name}/plan/heads/{layer}/{head}", response_model=schemas.MaskFigures)
async def get_plan_mask(
    name: str, layer: Number, head: Number, given: PlanQuery, served: Here
) -> Response:
    """The blocks of one head of a plan that selects by `static`, which needs no input."""
    profile = _profile(name, served)
    _check_head(name, profile, layer, head)
    return Json(await served.compute(_plan_mask, name, profile, layer, head, given, served))


def _plan_mask(
    name: str, profile: Profile, layer: int, head: int, given: PlanIn, served: Served
) -> schemas.MaskFigures:
    plan = _plan(profile, given)
    length = given.length or profile.facts.length
    n, most = plan.counts.shape[-1], served.settings.limits.blocks
    if n > most:
        raise ValueError(f"length {length:,} has {n:,} row blocks; at most {most} are drawn")
    mask = plan.mask(layer, length=length)  # raises for a selector that looks at the input
    blocks = np.asarray(mask[0, head].blocks())[0, 0]
    script = profiles.plan_python(served.profiles.python_path(name), plan, given.length)
    return schemas.MaskFigures(
        title=repr(mask),
        blocks=blocks.tolist(),
        density_ratio=float(plan.shares[layer, head]),
        density_of="causal blocks",
        length=length,
        block=plan.terms.block,
        heads=plan.counts.shape[1],
        head=head,
        visited_blocks=int((blocks > 0).sum()),
        python=f"{script}print(plan.mask({layer}, length={length})[0, {head}])\n",
    )


@router.get(
    "/{name}/plan/file",
    response_class=Response,
    responses={200: {"content": {"application/octet-stream": {}}}},
)
async def get_plan_file(name: str, given: PlanQuery, served: Here) -> Response:
    """The plan as a safetensors file, which `xsake.hads.Plan.load` reads."""
    profile = _profile(name, served)
    content = await served.compute(_plan_file, profile, given)
    more = "" if given.top_p is None else f"-top-p-{given.top_p:g}"
    more += "" if given.end_weight == 1 else f"-end-{given.end_weight:g}"
    file = f"plan-{given.policy}-{given.selector}-{given.density:g}{more}.safetensors"
    return Response(
        content,
        media_type="application/octet-stream",
        headers={"content-disposition": f'attachment; filename="{file}"'},
    )


def _plan_file(profile: Profile, given: PlanIn) -> bytes:
    return _plan(profile, given).to_bytes()
