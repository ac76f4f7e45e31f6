"""Options of the backends. They change speed, and results by rounding at most.

    Options ─┬─ deterministic
             ├─ xla               XlaSteps         chunk sizes of the plain JAX backend
             ├─ hopper_forward    ForwardTiling    tile sizes, stages and schedule of the forward
             └─ hopper_backward   BackwardTiling   likewise for the backward

None selects the default for the device. On Hopper, that is a record of the measured table
`backends/hopper/tilings/h200.json`, which `xsake bench --autotune` writes.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

# In which order work tiles are taken: as they lie in memory; the longest first, over all heads; the
# longest first within the query heads of each kv head; or within groups of heads whose operands fit
# in L2 together.
Order = Literal["natural", "longest", "heads", "sections"]
# Which CTA of a persistent grid takes which work tile: by a fixed pattern, or the next one from a
# counter in global memory.
Schedule = Literal["fixed", "counter"]


@dataclasses.dataclass(frozen=True)
class XlaSteps:
    """How many blocks the `xla` backend works on at once, and how it sums dq."""

    rows: int  # tokens of a chunk: queries, or keys in the backward over kv blocks
    keys: int  # keys that each row visits in one step, at least one block
    dq_by_rows: bool = False  # dq in a pass of its own: two more products, no scatter-add
    side_by_side: int = 1  # independent chunks of the forward in one loop body
    # Independent block pairs per loop iteration (cpu_jax_0_10.py); 0: use chunks instead.
    chains: int = 0
    # All visits in one loop, instead of the last and the full blocks of lists by themselves: full
    # blocks are masked too, and there is less to compile.
    one_loop: bool = False

    def __post_init__(self) -> None:
        for name in ("rows", "keys", "side_by_side"):
            if getattr(self, name) < 1:
                raise ValueError(f"XlaSteps.{name} must be at least 1, got {getattr(self, name)}")
        if self.chains < 0:
            raise ValueError(f"XlaSteps.chains must not be negative, got {self.chains}")


@dataclasses.dataclass(frozen=True)
class ForwardTiling:
    """Tuning parameters of the Hopper forward. They change results by rounding at most."""

    # Queries of a work tile. None: a row block of the mask. 192: three compute warpgroups instead
    # of two, where the mask is causal and nothing else, heads have up to 64 channels, and there is
    # no bias; elsewhere as None.
    rows: Literal[192] | None = None
    # Keys per product; divides the mask's kv block. None: the block, or 64 with a head of 256.
    step: int | None = None
    # K and V tiles in flight, each. None: 4 of 64 keys where they fit, else 2.
    stages: int | None = None
    # True: one CTA per multiprocessor loops over work tiles. False: one CTA per work tile.
    persistent: bool = True
    order: Order = "sections"
    schedule: Schedule = "counter"
    overlap: bool = True  # issue the scores of the next visit before the values of this one
    # The compute warpgroups alternate at the tensor cores; never with row blocks of 64.
    alternate_products: bool = True
    # Rescale acc only when the maximum grew by more than this power of two; 0: always.
    lazy_rescale: float = 0.0
    # Look for a row's maximum only in steps where the sum of its powers of two grew large, or while
    # nothing was allowed. Without effect where the entropy over keys is wanted. For lazy_rescale up
    # to 8: with more, a row may need its maximum in every step.
    lazy_maximum: bool = False
    # Tiles of a 16-bit bias of every pair pass through shared memory, with heads of up to 128 and
    # without statistics.
    bias_in_shared: bool = False
    compute_registers: int = 232
    memory_registers: int = 40
    l2_bytes: int = 24 << 20  # K and V of the heads that run together should fit here

    def __post_init__(self) -> None:
        if self.rows not in (None, 192):
            raise ValueError(f"ForwardTiling.rows must be 192 or None, got {self.rows}")


@dataclasses.dataclass(frozen=True)
class BackwardTiling:
    """Tuning parameters of the Hopper backward. They change results by rounding at most."""

    # True: one kernel with five products adds dq in float32, in any order (head sizes up to 128).
    # False: two kernels with seven products, or eight if H + Hv > 256.
    fused: bool = True
    # Queries per product of the kernel over kv blocks. None: 128 if fused with H = Hv = 64 and
    # blocks of 128 × 128, else 64.
    row_step: int | None = None
    # Q and d_out tiles in flight, each. None: 4 with kv blocks of 64 where they fit, else 2.
    row_stages: int | None = None
    # Keys per product of the kernel over row blocks. None: the block, or 64 with a head of 256.
    key_step: int | None = None
    # K and V tiles in flight, each. None: 4 of 64 keys with row blocks of 64 and head sizes up to
    # 128, else 2.
    key_stages: int | None = None
    persistent: bool = True  # as in ForwardTiling
    order: Order = "sections"  # as in ForwardTiling, by query head
    schedule: Schedule = "counter"
    # Fused: dq is cast to q's dtype in a "pass" of XLA, or in the "kernel" by a fourth warpgroup.
    cast: Literal["pass", "kernel"] = "pass"
    cast_registers: int = 24
    # How many times the cast polls a counter before it leaves the row block to the CTA that adds
    # the last visit.
    max_polls: int = 1 << 14
    compute_registers: int = 240
    memory_registers: int = 24
    l2_bytes: int = 24 << 20  # what the heads that run together read should fit here
    # The kernel over kv blocks visits its last full row block first: under a causal mask all kv
    # blocks of a head then read the same queries, and add to the same dq, at about the same time.
    # None: where what they would read otherwise is more than l2_bytes.
    descending: bool | None = None


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the backends. They change speed, and results by rounding at most.

    Attributes:
      deterministic: gradients are bit-equal from run to run, even where that costs speed.
      xla: chunk sizes instead of the device's.
      hopper_forward: a tiling instead of the measured table's.
      hopper_backward: likewise for the backward.
    """

    deterministic: bool = False
    xla: XlaSteps | None = None
    hopper_forward: ForwardTiling | None = None
    hopper_backward: BackwardTiling | None = None

    @classmethod
    def of(cls, options: Any) -> Options:
        """The options given, or the defaults for None."""
        if options is None:
            return cls()
        if not isinstance(options, cls):
            raise TypeError(f"options must be xsake.Options, got {type(options).__name__}")
        return options
