"""The numbers of Native Sparse Attention, checked, and which branches a call has."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax

from xsake.masks.integers import MAKE_STATIC, size_of

Score = Literal["nsa", "moba", "msa"]
# Blocks that are always selected, (initial, local), unless the caller says otherwise: those of the
# NSA paper; the current block alone for the others.
FORCED: dict[str, tuple[int, int]] = {"nsa": (1, 2), "moba": (0, 1), "msa": (0, 1)}


@dataclasses.dataclass(frozen=True)
class Settings:
    """The numbers of a call of `native_sparse_attention`, which explains them."""

    score: Score = "nsa"
    block_size: int = 64
    num_selected: int = 16
    initial_blocks: int | None = None
    local_blocks: int | None = None
    window_size: int | None = None
    compression_block: int = 32
    compression_stride: int = 16

    def __post_init__(self) -> None:
        if self.score not in FORCED:
            raise ValueError(f"score must be one of {list(FORCED)}, got {self.score!r}")
        for name in ("block_size", "num_selected", "compression_block", "compression_stride"):
            size_of(name, getattr(self, name), 1)
        if self.window_size is not None:
            size_of("window_size", self.window_size, 1)
        for name, least in (("initial_blocks", 0), ("local_blocks", 1)):
            if getattr(self, name) is not None:
                size_of(name, getattr(self, name), least)

    @property
    def forced(self) -> tuple[int, int]:
        """(initial, local): blocks that are always selected."""
        initial, local = FORCED[self.score]
        initial = initial if self.initial_blocks is None else self.initial_blocks
        return initial, local if self.local_blocks is None else self.local_blocks

    @property
    def choice(self) -> dict[str, Any]:
        """What the functions of `select` take beside the scores."""
        initial, local = self.forced
        return {"num_selected": self.num_selected, "initial": initial, "local": local}

    @property
    def pooling(self) -> dict[str, Any]:
        """Block and stride of the compressed branch."""
        return {"block": self.compression_block, "stride": self.compression_stride}

    def check(self, *, selects: bool, compresses: bool) -> None:
        """Raises if the numbers do not fit together; `selects`: blocks are not given."""
        initial, local = self.forced
        if selects and initial + local > self.num_selected:
            raise ValueError(
                f"num_selected = {self.num_selected} is below the {initial + local} blocks that "
                f"are always selected (initial_blocks = {initial}, local_blocks = {local}); "
                "raise it or lower those"
            )
        multiples = ["compression_block"] * compresses
        multiples += ["block_size"] * (selects and self.score == "nsa")
        for name in multiples:
            if getattr(self, name) % self.compression_stride:
                raise ValueError(
                    f"{name} must be a multiple of compression_stride = "
                    f"{self.compression_stride}, got {getattr(self, name)}"
                )

    def branches(
        self, gates: dict[str, Any], compressed: bool | None, has_indices: bool
    ) -> list[str]:
        """The branches to compute, by the names of their gates."""
        check_compressed(compressed)
        given = [name for name, gate in gates.items() if gate is not None]
        selects = self.score == "nsa" and not has_indices
        if "g_cmp" in given and compressed is None and not selects:
            reason = "block_indices do" if has_indices else f"score={self.score!r} does"
            raise ValueError(
                f"g_cmp gates a compressed branch that would not select the blocks ({reason}); "
                "pass compressed=True for both, or leave one out"
            )
        if "g_cmp" in given and compressed is False:
            raise ValueError("g_cmp needs the compressed branch, but compressed is False")
        if "g_swa" in given and self.window_size is None:
            raise ValueError("g_swa needs window_size, the number of tokens that a query sees")
        if given:
            if compressed and "g_cmp" not in given:
                raise ValueError(
                    f"compressed=True adds a branch, and {given[0]} is given, so g_cmp is needed "
                    "too"
                )
            if has_indices and "g_slc" not in given:
                raise ValueError(
                    f"block_indices are for the selected branch, which is off because {given[0]} "
                    "is given and g_slc is not; give g_slc too, or leave block_indices out"
                )
            return given
        wanted = {
            "g_cmp": selects if compressed is None else compressed,
            "g_slc": True,
            "g_swa": self.window_size is not None,
        }
        return [name for name, is_wanted in wanted.items() if is_wanted]


def check_compressed(compressed: Any) -> None:
    """Raises unless `compressed` is True, False or None."""
    if compressed is None or isinstance(compressed, bool):
        return
    what = f"{compressed!r}"
    if isinstance(compressed, jax.core.Tracer):
        what = f"a traced array; {MAKE_STATIC}"
    raise TypeError(f"compressed must be True, False or None, got {what}")
