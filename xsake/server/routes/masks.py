"""/api/masks: masks of rules and of fixed patterns, as the library computes them."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, HTTPException, Query
from pydantic import BaseModel, Field
from starlette.responses import Response

from xsake.hads import baselines, row_blocks
from xsake.server import drawings, schemas
from xsake.server.reader import METHODS
from xsake.server.served import Here, Json

router = APIRouter(prefix="/api/masks", tags=["masks"])
MAX_LENGTH = 1 << 17  # tokens of a drawing
MOST = (1 << 31) - 1


class MaskIn(BaseModel):
    """A rule with its parameters, or a method at a density; /api/masks/choices describes them."""

    rule: (
        Literal[
            "causal",
            "sliding_window",
            "sink_window",
            "longformer",
            "bigbird",
            "chunked",
            "strided",
            "dilated",
            "global_tokens",
            "random",
        ]
        | None
    ) = None
    method: (
        Literal["sliding_window", "sink_window", "longformer", "bigbird", "strided", "random"]
        | None
    ) = None
    causal: bool = Field(True, description="of a rule: a query sees no later key")
    length: int = Field(2048, ge=1, le=MAX_LENGTH)
    block: int = Field(128, ge=1, le=1024)
    heads: int = Field(1, ge=1)
    head: int = Field(0, ge=0)
    left: int = Field(256, ge=0, le=MOST)
    right: int = Field(0, ge=0, le=MOST)
    first: int = Field(64, ge=0, le=MOST)
    n_global: int = Field(64, ge=0, le=MOST)
    size: int = Field(512, ge=1, le=MOST)
    stride: int = Field(256, ge=1, le=MOST)
    dilation: int = Field(4, ge=1, le=1 << 12)
    density: float = Field(0.25, ge=0, le=1, allow_inf_nan=False)
    seed: int = Field(0, ge=0, le=MOST)


@router.get("/choices", response_model=schemas.MaskChoices)
def list_choices(served: Here) -> Response:
    """Rules and their parameters, and methods."""
    rules = [
        schemas.RuleDescription(
            name=name,
            description=about,
            parameters=[
                schemas.RuleParameter(
                    name=x, default=drawings.PARAMETERS[x][0], is_whole=drawings.PARAMETERS[x][1]
                )
                for _, parameters in terms
                for x in parameters
            ],
        )
        for name, (about, terms) in drawings.RULES.items()
    ]
    methods = [
        schemas.MethodDescription(name=x, description=y, is_fixed=x in baselines.FIXED)
        for x, y in METHODS.items()
    ]
    limits = served.settings.limits
    return Json(
        schemas.MaskChoices(
            rules=rules, methods=methods, most_blocks=limits.blocks, most_heads=limits.heads
        )
    )


@router.get("", response_model=schemas.MaskFigures)
async def get_mask(given: Annotated[MaskIn, Query()], served: Here) -> Response:
    """The blocks of a rule or of a method, its density, and the Python that computes them."""
    limits = served.settings.limits
    if (given.rule is None) == (given.method is None):
        raise HTTPException(422, "give either rule or method; /api/masks/choices lists them")
    n = row_blocks.count_blocks(given.length, given.block)
    if n > limits.blocks:
        raise HTTPException(
            422,
            f"{given.length:,} tokens in blocks of {given.block} are {n:,} blocks; at most "
            f"{limits.blocks} are drawn: ask for larger blocks or a shorter length",
        )
    if given.heads > limits.heads or given.head >= given.heads:
        raise HTTPException(
            422,
            f"head {given.head} of {given.heads} is asked for; heads may be up to {limits.heads}, "
            "and head must be below heads",
        )
    return Json(await served.compute(_figures, given))


def _figures(given: MaskIn) -> schemas.MaskFigures:
    shape = {
        "length": given.length,
        "block": given.block,
        "heads": given.heads,
        "head": given.head,
    }
    if given.rule is not None:
        values = {name: getattr(given, name) for name in drawings.PARAMETERS}
        found = drawings.draw_rule(given.rule, values, causal=given.causal, **shape)
    else:
        found = drawings.draw_method(str(given.method), given.density, seed=given.seed, **shape)
    return schemas.MaskFigures(
        title=found.title,
        blocks=found.blocks.tolist(),
        density_ratio=found.density,
        density_of="causal blocks" if found.is_causal else "all blocks",
        visited_blocks=int((found.blocks > 0).sum()),
        python=found.python,
        **shape,
    )
