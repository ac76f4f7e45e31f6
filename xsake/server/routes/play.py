"""/api/play: a text is read once; methods, heads and words of it are cheap calls."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from fastapi import APIRouter, HTTPException, Path, Query
from pydantic import BaseModel, Field
from starlette.responses import Response

from xsake.server import passes, schemas, snippets
from xsake.server.examples import examples
from xsake.server.profiles import least_density
from xsake.server.reader import METHODS, Reader, Text, kl_of
from xsake.server.served import Here, Json, Served, number, numbers

router = APIRouter(prefix="/api/play", tags=["play"])
TOP = 10  # next tokens that are listed
MOST_CHANGED = 200  # words that are listed


class MethodIn(BaseModel):
    """A method at a density."""

    method: str = Field("hads", max_length=40)
    density: float = Field(gt=0, le=1, allow_inf_nan=False)


class PredictIn(MethodIn):
    """A method at a density, with or without its predictions."""

    predict: bool = Field(True, description="run the model with the method's blocks")


MethodQuery = Annotated[MethodIn, Query()]
Id = Annotated[str, Path(max_length=64)]
Number = Annotated[int, Path(ge=0, lt=1 << 16)]


@router.get("/model", response_model=schemas.ModelFigures)
async def get_model(served: Here) -> Response:
    """The model, the methods, and texts to begin with."""
    return Json(await served.compute(_model, served))


def _model(served: Served) -> schemas.ModelFigures:
    reader = served.reader()
    config = reader.config
    known = {x for block in reader.longest for x in reader.methods(block)}
    return schemas.ModelFigures(
        name="shipped" if reader.is_shipped else reader.path.name,
        hash=reader.subject.hash,
        layers=config.layers,
        heads=config.heads,
        width=config.width,
        parameters=reader.parameters,
        context=config.context,
        blocks=list(reader.longest),
        longest={str(block): most for block, most in reader.longest.items()},
        methods=[
            schemas.MethodDescription(name=x, description=y, is_fixed=x not in ("hads", "oracle"))
            for x, y in METHODS.items()
            if x in known
        ],
        examples=list(examples(served.results.all()[0])) if reader.is_shipped else [],
        is_shipped=reader.is_shipped,
    )


@router.post("/texts", response_model=schemas.TextFigures)
async def read_text(given: schemas.TextIn, served: Here) -> Response:
    """Reads a text with dense attention; `id` names it in the other calls."""
    most = served.settings.limits.text_characters
    if len(given.text) > most:
        raise HTTPException(
            413, f"the text has {len(given.text):,} characters; at most {most:,} are read"
        )
    return Json(await served.compute(_read, served, given))


def _read(served: Served, given: schemas.TextIn) -> schemas.TextFigures:
    reader = served.reader()
    text = reader.read(given.text, given.block)
    name = reader.profiles[text.block][0] if text.block in reader.profiles else None
    return schemas.TextFigures(
        id=text.id,
        tokens=_tokens(reader, text),
        length=text.length,
        block=text.block,
        row_blocks=text.n,
        layers=reader.subject.layers,
        heads=reader.subject.heads,
        is_cut=text.is_cut,
        least_density_ratio=least_density(text.length, text.block),
        entropy=numbers(text.entropy()),
        block_entropy=numbers(text.block_entropy()),
        dense_next=_top(reader, text.dense_next, text.dense_next),
        methods=reader.methods(text.block),
        profile=name,
        seconds=text.seconds,
    )


def _tokens(reader: Reader, text: Text) -> list[schemas.Token]:
    return [
        schemas.Token(id=int(i), text=_shown(reader, int(i)), begin=begin, end=end)
        for i, (begin, end) in zip(text.tokens[: text.length], text.offsets, strict=True)
    ]


def _shown(reader: Reader, token: int) -> str:
    return reader.tokenizer.decode([token], special=True)


def _top(reader: Reader, found: np.ndarray, dense: np.ndarray) -> list[schemas.Prediction]:
    """The most likely tokens, of either distribution."""
    ids = np.argsort(-found, kind="stable")[:TOP]
    return [
        schemas.Prediction(
            id=int(i),
            text=_shown(reader, int(i)),
            probability=float(np.exp(found[i])),
            dense_probability=float(np.exp(dense[i])),
        )
        for i in ids
    ]


@router.get("/texts/{id}/method", response_model=schemas.MethodFigures)
async def get_method(
    id: Id,  # noqa: A002
    given: Annotated[PredictIn, Query()],
    served: Here,
) -> Response:
    """A method at a density on a text: budgets, mass kept, KL, and the next token.

    Without `predict` the next token is left out, and the answer takes a few milliseconds.
    """
    return Json(await served.compute(_method, served, id, given))


def _method(served: Served, id_: str, given: PredictIn) -> schemas.MethodFigures:
    reader = served.reader()
    text = reader.text(id_)
    found = reader.measured(text, given.method, given.density, given.predict)
    dense, after = text.dense_next, found.next
    profile = ""
    if text.block in reader.profiles:
        profile = served.profiles.python_path(reader.profiles[text.block][0])
    return schemas.MethodFigures(
        text=id_,
        method=given.method,
        requested_density_ratio=given.density,
        density_ratio=found.density,
        shares=numbers(found.choice.shares),
        kl=numbers(found.kl),
        recall=numbers(found.recall),
        mean_kl=number(found.kl.mean()),
        mean_recall=number(found.recall.mean()),
        next=[] if after is None else _top(reader, after, dense),
        next_kl=None if after is None else number((np.exp(dense) * (dense - after)).sum()),
        seconds=found.seconds,
        python=snippets.play(text, given.method, given.density, reader.path, profile),
    )


@router.get("/texts/{id}/heads/{layer}/{head}", response_model=schemas.HeadOfText)
async def get_head(
    id: Id,  # noqa: A002
    layer: Number,
    head: Number,
    given: MethodQuery,
    served: Here,
) -> Response:
    """One head on a text: where its attention goes, and what a method keeps of it."""
    return Json(await served.compute(_head, served, id, layer, head, given))


def _head(served: Served, id_: str, layer: int, head: int, given: MethodIn) -> schemas.HeadOfText:
    reader = served.reader()
    text = reader.text(id_)
    layers, heads = reader.subject.layers, reader.subject.heads
    if layer >= layers or head >= heads:
        raise HTTPException(404, f"the model has {layers} layers of {heads} heads")
    choice = reader.choice(text, given.method, given.density)
    kept = text.kept(choice.blocks[layer, head], (layer, head))
    return schemas.HeadOfText(
        layer=layer,
        head=head,
        mass=numbers(np.round(text.row_mass(layer, head), 6)),
        chosen=choice.blocks[layer, head].astype(int).tolist(),
        dropped=numbers(1 - np.nanmean(kept, -1)),
        kl=numbers(np.nanmean(kl_of(kept), -1)),
        share=float(choice.shares[layer, head]),
        entropy=number(text.entropy()[layer, head]),
    )


@router.get("/texts/{id}/words", response_model=schemas.WordFigures)
async def get_words(id: Id, given: MethodQuery, served: Here) -> Response:  # noqa: A002
    """Where a method changes the most likely next word, along the whole text."""
    return Json(await served.compute(_words, served, id, given))


def _words(served: Served, id_: str, given: MethodIn) -> schemas.WordFigures:
    reader = served.reader()
    text = reader.text(id_)
    choice, found = reader.words(text, given.method, given.density)
    end = text.length - 1  # the last token has no successor
    changed = np.flatnonzero(found.best[0, :end] != found.best[1, :end])
    loss, dense_loss = _losses(found, end)
    return schemas.WordFigures(
        text=id_,
        method=given.method,
        density_ratio=float(choice.shares.mean()),
        changed=[
            schemas.ChangedWord(
                position=int(i),
                dense=_shown(reader, int(found.best[0, i])),
                dense_probability=float(found.best_probability[0, i]),
                sparse=_shown(reader, int(found.best[1, i])),
                sparse_probability=float(found.best_probability[1, i]),
                kl=number(found.kl[i]),
            )
            for i in changed[:MOST_CHANGED]
        ],
        changed_ratio=len(changed) / max(end, 1),
        logit_kl=number(found.kl[:end].mean()) if end else None,
        loss_nats=loss,
        dense_loss_nats=dense_loss,
        perplexity_gap=None
        if loss is None or dense_loss is None
        else number(np.expm1(loss - dense_loss)),
    )


def _losses(found: passes.Words, end: int) -> tuple[float | None, float | None]:
    """Mean loss, sparse and dense; None for a text of one token."""
    if not end:
        return None, None
    dense, sparse = found.loss[:, :end].mean(-1)
    return number(sparse), number(dense)
