"""Sparse: the settings of attention = "nsa" | "moba" | "msa", read from the model's config.

nsa    compressed + selected + window, each with a gate; 16 blocks of 64, window 512
moba   selected by mean keys
msa    selected by a learned indexer, blocks of 128
"""

from __future__ import annotations

import dataclasses

from xsake import _files
from xsake.nsa.settings import Score, Settings

ATTENTIONS = ("dense", "nsa", "moba", "msa")
COMPRESSIONS = ("mean", "weights", "mlp")
BLOCK_SIZE: dict[str, int] = {"nsa": 64, "moba": 64, "msa": 128}
WINDOW_SIZE: dict[str, int] = {"nsa": 512, "moba": 0, "msa": 0}
# Fields that are read only if there is a compressed branch or, for the second group, an indexer.
OF_COMPRESSION = ("compression", "compression_block", "compression_stride", "compression_width")
OF_INDEXER = ("index_size", "index_heads")


@dataclasses.dataclass(frozen=True)
class Sparse:
    """Settings of sparse attention; `xsake.native_sparse_attention` explains most of them."""

    block_size: int | None = None  # tokens of a selected block; None: 64, for msa 128
    num_selected: int = 16  # blocks of each query, forced ones included
    initial_blocks: int | None = None  # first blocks, always selected; None: 1 for nsa, else 0
    local_blocks: int | None = None  # last blocks, always selected; None: 2 for nsa, else 1
    window_size: int | None = None  # of the window branch; None: 512 for nsa, else 0; 0: no branch
    compressed: bool | None = None  # whether there is a compressed branch; None: for nsa only
    compression: str = "mean"  # mean | weights (learned, with position embedding) | mlp
    compression_block: int = 32  # tokens of a pooled block
    compression_stride: int = 16  # tokens from one pooled block to the next
    compression_width: int | None = None  # hidden units of mlp; None: head_size
    index_size: int | None = None  # head size of the indexer of msa; None: head_size
    index_heads: int = 1  # heads of the indexer's keys: 1 or kv_heads

    def __post_init__(self) -> None:
        _files.check_fields(Sparse, vars(self), "sparse")
        if self.compression not in COMPRESSIONS:
            raise ValueError(
                f"sparse.compression {self.compression!r} is not one of {list(COMPRESSIONS)}"
            )
        for name in ("compression_width", "index_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"sparse.{name} must be at least 1, got {value}")
        if self.window_size is not None and self.window_size < 0:
            raise ValueError(
                f"sparse.window_size must be at least 0 (no window), got {self.window_size}"
            )

    def settings(self, attention: Score) -> Settings:
        """The numbers that `xsake.nsa` takes, checked."""
        block, window = self.block_size, self.window_size
        try:
            made = Settings(
                score=attention,
                block_size=BLOCK_SIZE[attention] if block is None else block,
                num_selected=self.num_selected,
                initial_blocks=self.initial_blocks,
                local_blocks=self.local_blocks,
                window_size=(WINDOW_SIZE[attention] if window is None else window) or None,
                compression_block=self.compression_block,
                compression_stride=self.compression_stride,
            )
            made.check(selects=True, compresses=True)
        except (TypeError, ValueError) as error:
            raise ValueError(f"sparse.{error}") from error
        return made

    def branches(self, attention: Score) -> tuple[str, ...]:
        """The branches of a layer, by the names of their gates.

        >>> Sparse().branches("nsa"), Sparse().branches("msa")
        (('g_cmp', 'g_slc', 'g_swa'), ('g_slc',))
        """
        compressed = attention == "nsa" if self.compressed is None else self.compressed
        has = {
            "g_cmp": compressed,
            "g_slc": True,
            "g_swa": self.settings(attention).window_size is not None,
        }
        return tuple(name for name, is_there in has.items() if is_there)


def check(attention: str, sparse: Sparse, *, kv_heads: int, head_size: int, rope: bool) -> None:
    """Raises unless these settings describe one attention, with none that is not read."""
    if attention not in ATTENTIONS:
        raise ValueError(f"attention {attention!r} is not one of {list(ATTENTIONS)}")
    unread: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(Sparse))
    why = f"attention = {attention!r}"
    if attention != "dense":
        score: Score = attention  # type: ignore[assignment]  # one of ATTENTIONS but dense
        branches, unread = sparse.branches(score), ()
        if attention == "moba" and "g_cmp" in branches:
            raise ValueError(
                "sparse.compressed adds a branch that attention = 'moba' does not have: its cache "
                "holds means of whole blocks; use 'nsa' or leave it out"
            )
        if attention != "nsa" and "g_cmp" not in branches:
            unread += OF_COMPRESSION
        elif sparse.compression != "mlp":
            unread += ("compression_width",)
        if attention != "msa":
            unread += OF_INDEXER
        why = f"attention = {attention!r} and compression = {sparse.compression!r}"
    default = Sparse()
    for name in unread:
        if getattr(sparse, name) != getattr(default, name):
            raise ValueError(
                f"sparse.{name} = {getattr(sparse, name)!r} is not read with {why}; leave it out"
            )
    if attention == "msa":
        if sparse.index_heads not in (1, kv_heads):
            raise ValueError(
                f"sparse.index_heads must be 1 or kv_heads = {kv_heads}, got {sparse.index_heads}"
            )
        size = head_size if sparse.index_size is None else sparse.index_size
        if rope and size % 2:
            raise ValueError(
                f"RoPE rotates pairs of dimensions, so sparse.index_size must be even, got {size}"
            )
