"""What the routes answer, as pydantic models: OpenAPI and the pages' TypeScript come from them.

A number that is not finite, or not known, is null. Grids are lists of rows. Ratios run from 0 to 1,
and units are in the names, as in the events.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

Number = float | None
Row = list[Number]
Grid = list[Row]  # [layers][heads], or [row blocks][kv blocks]
Marks = list[list[int]]


class Health(BaseModel):
    """The server is up."""

    status: Literal["ok"] = "ok"
    version: str


# --------------------------------------------------------------------------------------------- runs


class RunSummary(BaseModel):
    """A run: its state and its newest figures, as `xsake runs` lists them."""

    name: str
    state: str = Field(description="running, dead, not started, or why it stopped or is damaged")
    is_live: bool
    step: int
    steps: int
    loss_nats: Number
    density_ratio: Number
    perplexity: dict[str, Number] = Field(description="by evaluation file")
    checkpoints: list[int]
    plans: int
    config_hash: str
    data_hash: str
    plan: str
    commit: str
    device: str
    has_config: bool
    source: str = Field(description="of a run that comes with the package, else empty")
    results: list[str] = Field(description="result files with its hashes of config and data")


class RunList(BaseModel):
    """All runs, by name."""

    runs: list[RunSummary]


class EventPage(BaseModel):
    """Events of a run in the order of its file; an event is an object of events.jsonl."""

    events: list[dict[str, Any]]
    ids: list[str] = Field(description="of the events, for `after` and Last-Event-ID")
    damaged: list[int] = Field(description="numbers of lines that are not JSON objects")
    next: str = Field(description="id of the last line read; `after=` it gives what follows")
    is_end: bool = Field(description="no complete line follows yet")
    total: int = Field(description="complete lines of the file")


# ------------------------------------------------------------------------------- profiles and plans


class ProfileSummary(BaseModel):
    """Where a profile comes from."""

    name: str
    layers: int
    heads: int
    row_blocks: int
    length: int
    block: int
    band: int
    documents: int
    model_hash: str
    data_hash: str
    selectors: list[str] = Field(description="that a plan can be made for by every policy")
    policies: list[str] = Field(description="`loss` only if the profile has its cost curves")
    least_density_ratio: float = Field(description="of the forced blocks, at its own length")
    is_of_model: bool = Field(description="of the model that the server has loaded")


class ProfileList(BaseModel):
    """All profiles."""

    profiles: list[ProfileSummary]


class ProfileFigures(BaseModel):
    """Statistics of every head."""

    summary: ProfileSummary
    entropy: Grid = Field(description="[layers][heads], token entropy ÷ ln(visible keys)")
    entropy_error: Grid | None = Field(description="standard errors; null of one document")
    block_entropy: Grid
    densities: list[float] = Field(description="of the retained-mass curves")
    retained: list[Grid] = Field(description="[layers][heads][densities]")
    retained_mean: Row
    agreement: dict[str, Number] = Field(description="of two halves of the documents")
    python: str


class HeadFigures(BaseModel):
    """One head of a profile."""

    layer: int
    head: int
    entropy: Number
    block_entropy: Number
    mass: Grid = Field(description="[row blocks][kv blocks], mean attention mass")
    sensitivity: Grid
    retained: Row
    densities: list[float]


class Measured(BaseModel):
    """A published measurement of a method like this plan, on held-out text."""

    result: str
    method: str
    density_ratio: Number
    kl: Number
    recall: Number
    output_error: Number
    logit_kl: Number
    perplexity_gap: Number
    perplexity_gap_standard_error: Number


class PlanFigures(BaseModel):
    """A plan made from a profile, and what the profile estimates for it."""

    profile: str
    policy: str
    selector: str
    length: int
    block: int
    requested_density_ratio: float
    density_ratio: float = Field(description="of the counts; with top_p at most this")
    least_density_ratio: float
    shares: Grid = Field(
        description="[layers][heads], the density of every head; with top_p at most this"
    )
    counts: list[list[list[int]]] = Field(
        description="[layers][heads][row blocks], blocks visited; with top_p at most these"
    )
    visited_blocks: int = Field(description="sum of the counts; with top_p at most this")
    causal_blocks: int
    cost_ratio: float = Field(
        description="attention FLOPs with selection ÷ those of dense; with top_p at most this"
    )
    estimated_kl: Number = Field(description="mean over heads and row blocks, from the profile")
    estimated_output_error: Number = Field(description="root of the mean over layers, likewise")
    estimated_recall: Number = Field(description="mass kept by the plan's counts of best blocks")
    estimate_note: str
    notes: list[str]
    measured: list[Measured] = Field(description="none with top_p: no table has such methods")
    python: str


# -------------------------------------------------------------------------------------------- masks


class RuleParameter(BaseModel):
    """A parameter of a rule."""

    name: str
    default: float | None
    is_whole: bool


class RuleDescription(BaseModel):
    """A rule that /api/masks draws."""

    name: str
    description: str
    parameters: list[RuleParameter]


class MethodDescription(BaseModel):
    """A pattern at a given density."""

    name: str
    description: str
    is_fixed: bool = Field(description="does not depend on the input: /api/masks draws it")


class MaskChoices(BaseModel):
    """What /api/masks draws, and its limits."""

    rules: list[RuleDescription]
    methods: list[MethodDescription]
    most_blocks: int
    most_heads: int


class MaskFigures(BaseModel):
    """A mask of one head as a grid of blocks: 0 empty, 1 partial, 2 full."""

    title: str
    blocks: Marks
    density_ratio: float
    density_of: Literal["causal blocks", "all blocks"]
    length: int
    block: int
    heads: int
    head: int
    visited_blocks: int
    python: str


# ------------------------------------------------------------------------------------------ results


class ResultSummary(BaseModel):
    """A result file."""

    name: str
    date: str
    device: str
    commit: str
    command: str
    versions: dict[str, str]
    rows: int
    bytes: int
    sources: list[str] = Field(description="suites, kinds or methods of its rows")
    description: str = Field(description="what the file holds; empty if it is not the project's")
    density_of: str = Field(description="of what its densities are the share; empty if not known")


class ResultList(BaseModel):
    """All result files, newest first."""

    results: list[ResultSummary]
    unreadable: dict[str, str] = Field(description="files that cannot be read, and why")


class ResultRows(BaseModel):
    """Measurements as flat rows, for charts and tables."""

    columns: list[str]
    rows: list[dict[str, str | float | int | bool | None]]
    total: int = Field(description="rows that match, of which `rows` holds one page")
    values: dict[str, list[str]] = Field(description="of the text columns, to filter by")


# --------------------------------------------------------------------------------------------- play


class TextIn(BaseModel):
    """A text for the model to read."""

    text: str = Field(min_length=1)
    block: int | None = Field(None, description="tokens per block; default by the text's length")


class Token(BaseModel):
    """A token and the characters of the text that it covers."""

    id: int
    text: str
    begin: int
    end: int


class Prediction(BaseModel):
    """A possible next token."""

    id: int
    text: str
    probability: float
    dense_probability: float


class TextFigures(BaseModel):
    """A text that the model has read with dense attention."""

    id: str
    tokens: list[Token]
    length: int
    block: int
    row_blocks: int
    layers: int
    heads: int
    is_cut: bool = Field(
        description="the text is longer than the model reads; the rest is left out"
    )
    least_density_ratio: float
    entropy: Grid = Field(description="[layers][heads] on this text")
    block_entropy: Grid
    dense_next: list[Prediction]
    methods: list[str]
    profile: str | None = Field(description="that the plans of this text are made from")
    seconds: float


class MethodFigures(BaseModel):
    """A method at a density on a text.

    Masses and KL are on the dense pass's activations; predictions come from a pass in which every
    layer is sparse.
    """

    text: str
    method: str
    requested_density_ratio: float
    density_ratio: float
    shares: Grid = Field(description="[layers][heads], the density of every head")
    kl: Grid = Field(description="[layers][heads], KL(sparse ‖ dense), mean over queries")
    recall: Grid = Field(description="[layers][heads], attention mass kept, mean over queries")
    mean_kl: Number
    mean_recall: Number
    next: list[Prediction]
    next_kl: Number = Field(description="KL(dense ‖ sparse) of the next token, in nats")
    seconds: float
    python: str


class HeadOfText(BaseModel):
    """One head on a text: where its attention goes, and what a method keeps of it."""

    layer: int
    head: int
    mass: Grid = Field(description="[row blocks][kv blocks], dense attention mass")
    chosen: Marks = Field(description="1 where the method visits the block")
    dropped: Row = Field(description="[row blocks], mass of the blocks that are not visited")
    kl: Row = Field(description="[row blocks], mean over its queries")
    share: float
    entropy: Number


class ChangedWord(BaseModel):
    """A place where the most likely next token is another one than with dense attention."""

    position: int
    dense: str
    dense_probability: float
    sparse: str
    sparse_probability: float
    kl: Number


class WordFigures(BaseModel):
    """How a method changes the predictions along a text."""

    text: str
    method: str
    density_ratio: float
    changed: list[ChangedWord]
    changed_ratio: float
    logit_kl: Number = Field(description="mean over tokens")
    loss_nats: Number
    dense_loss_nats: Number
    perplexity_gap: Number


class Example(BaseModel):
    """A text that shows what some heads do."""

    name: str
    text: str
    about: str
    layer: int | None
    head: int | None


class ModelFigures(BaseModel):
    """The model of the page Play."""

    name: str
    hash: str
    layers: int
    heads: int
    width: int
    parameters: int
    context: int
    blocks: list[int] = Field(description="that it can be shown in")
    longest: dict[str, int] = Field(description="tokens of a text, by block")
    methods: list[MethodDescription]
    examples: list[Example]
    is_shipped: bool
