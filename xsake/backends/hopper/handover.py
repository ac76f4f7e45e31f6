"""Partial results that compute warpgroup 1 hands to warpgroup 0, where both have the same rows."""

from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

from xsake.backends.hopper.layouts import PANEL, ROW, TILE


class Handover:
    """A float32 tile through shared memory, one panel of 64 columns at a time."""

    def __init__(self, panel_smem, ready, taken):
        self.panel_smem, self.ready, self.taken = panel_smem, ready, taken

    @staticmethod
    def barriers() -> dict[str, Any]:
        """The scratch that a handover needs, besides the panel."""
        return {"piece_ready": plgpu.Barrier(), "piece_taken": plgpu.Barrier()}

    def give(self, tile, row_values=()):
        """Writes every panel of a tile; `row_values` are (smem, value) pairs sent with the first.

        A row value is one number per row.
        """
        for column in range(0, tile.shape[-1], PANEL):
            for smem, value in row_values if column == 0 else ():
                smem[...] = value
            self.panel_smem[...] = tile[:, column : column + PANEL]
            plgpu.barrier_arrive(self.ready)
            plgpu.barrier_wait(self.taken)

    def take(self, row_smem=()):
        """The next panel [64, 64], and the row values that lie in `row_smem`."""
        plgpu.barrier_wait(self.ready)
        panel = plgpu.load(self.panel_smem, layout=TILE)
        values = [plgpu.load(smem, layout=ROW, optimized=False) for smem in row_smem]
        plgpu.barrier_arrive(self.taken)
        return panel, values
