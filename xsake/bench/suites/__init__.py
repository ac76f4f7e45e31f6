"""One module per suite. A suite defines what is measured.

A suite of `xsake bench --suite NAME` is a module with a function

    parts(quick, model) -> parts        quick: smaller sizes; model: the checkpoint, if it needs one

and an entry in `run.SUITES`. Its records are dictionaries with units in the names; a part measures
the records of one case, so that an interrupted run can resume with the next case.

Those whose names begin with `hopper` need a Hopper GPU: `xsake bench` refuses them elsewhere.

    costs                  seconds of a call by `xla` and by `dense`, for the choice between them
    cpu                    time against density, memory, mask construction; jax.nn as the peer
    hopper                 speed compared with peers, uneven heads, transposed lists
    hopper_bias            bias and token masks, beside jax.nn on XLA and on cuDNN
    hopper_features        one case per feature, the xla backend on a GPU, memory
    hopper_nsa             Native Sparse Attention, part by part, beside open kernels
    hopper_rules           causal masks, windows and packed documents, beside peers
    hopper_statistics      what entropy and block mass cost beside the Hopper forward
    hopper_versions        the cases of `hopper` at this commit and at another one
    model                  loading, prefill and decode of a checkpoint
    nsa                    Native Sparse Attention: time, memory, error against `reference`

The other modules are programs, python -m xsake.bench.suites.NAME:

    certificate            certified attention: coverage, adversarial inputs, and its price
    counters               hardware counters of the Hopper kernels, by Nsight Compute
    hads_table             HADS on one model: calibration, table of methods, speed
    tasks                  long-context tasks, perplexity, and which heads carry the answers
    selection              the kernels that select blocks, one by one, and their tilings
    parallel               what split sequences send, how evenly devices work
    first_call             seconds of first calls: to trace, lower, compile and run once
    head_roles             previous-token, induction and sink heads of the shipped model
    sparse_training        a model trained with dense attention, NSA and MSA, compared
    train_step             seconds, tokens/s and memory of whole training steps
    train_profile          kernels of a training step, by what they do
    training               finished training runs, compared
    tpu_estimate           the `tpu` backend's operations and bytes, counted; least times of chips
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

Record = dict[str, Any]  # one measurement: {"suite": …, "case": …, "median_seconds": …, …}


class Part(NamedTuple):
    """One case of a suite."""

    case: str
    measure: Callable[[list[Record]], Iterator[Record]]  # (records so far) -> this case's records
    group: str = ""  # cases of a group need each other's records; "" is a group of its own


class Suite(Protocol):
    """A module in this package that `xsake bench --suite` can run."""

    def parts(self, quick: bool, model: Path | None = None) -> Iterable[Part]:
        """The suite's cases, in order."""
