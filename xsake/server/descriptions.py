"""What the result files of the project hold, in one sentence each, and what their density counts.

Files are known by the name that comes before their date: `hopper-bias-2026-11-18` by `hopper-bias`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_DATED = re.compile(r"-\d{4}-\d\d-\d\d$")
_SQUARE = "all blocks of T × S, those that no query sees included"
_CAUSAL = "the blocks that causal attention visits"
_HEADS = f"{_CAUSAL}, mean of all heads"


class Description(NamedTuple):
    """A sentence, and of what the column `density` is the share; empty if there is none."""

    words: str
    density_of: str = ""


UNKNOWN = Description("")

_TASKS = "Answers of SmolLM2-135M to questions about long texts: "

DESCRIPTIONS: dict[str, Description] = {
    "certificate-coverage": Description(
        "How often the certificate's error bars hold the true error, on held-out text.", _HEADS
    ),
    "certificate-one-key": Description(
        "One key that a single query wants, in a block that was dropped: who notices it."
    ),
    "certificate-speed": Description(
        "Time of selection, sparse attention and certificate beside dense attention by cuDNN.",
        _HEADS,
    ),
    "certificate-speed-128": Description(
        "Time of selection, sparse attention and certificate with blocks of 64 and of 128.", _HEADS
    ),
    "certificate-speed-grouped": Description(
        "Time of selection, sparse attention and certificate with nine query heads of 64 on three "
        "kv heads.",
        _HEADS,
    ),
    "certificate-speed-model": Description(
        "Time of selection, sparse attention and certificate on activations of SmolLM2-135M.",
        _HEADS,
    ),
    "certificate-speed-model-batch": Description(
        "Time of selection, sparse attention and certificate on activations of SmolLM2-135M, four "
        "documents together.",
        _HEADS,
    ),
    "certificate-speed-model-batch-8": Description(
        "Time of selection, sparse attention and certificate on activations of SmolLM2-135M, eight "
        "documents together.",
        _HEADS,
    ),
    "claims-baselines-cpu": Description(
        "Fixed patterns, the earlier XSAKE's rule and HADS with equally many blocks: SmolLM2-135M "
        "at 2,048 tokens on a CPU.",
        _HEADS,
    ),
    "claims-speed-cpu": Description(
        "Dense attention, block lists, and selection with block lists on a CPU: time and memory.",
        _CAUSAL,
    ),
    "claims-speed-h200": Description(
        "Dense attention by cuDNN, block lists, and selection with block lists on an H200.",
        _CAUSAL,
    ),
    "cost": Description(
        "Bytes and times of very long sequences on many cards, from the cost model: estimated, not "
        "measured.",
        _CAUSAL,
    ),
    "costs-cpu": Description(
        "Small calls by the backends xla and dense: what the choice between them is fitted to."
    ),
    "counters": Description("Hardware counters of the Hopper kernels, by Nsight Compute."),
    "cpu": Description(
        "Time against density on a CPU, beside jax.nn; memory; time to make masks.", _CAUSAL
    ),
    "cpu-jax-0.10": Description("The suite cpu with JAX 0.10.", _CAUSAL),
    "first-step-cpu": Description("First training step of a small model beside two busy loops."),
    "first-step-h200": Description("First calls on an H200 by stage, also with a cache."),
    "hads-64": Description(
        "SmolLM2-135M-Instruct, blocks of 64: perplexity, KL and kept mass of HADS, "
        "fixed patterns and the oracle at equal density.",
        _HEADS,
    ),
    "hads-profile-cpu": Description("Time to calibrate SmolLM2-135M on a CPU."),
    "hads-profile-h200": Description("Time to calibrate SmolLM2-135M on an H200."),
    "hads-speed": Description(
        "Time of selection and sparse attention beside dense attention by cuDNN.", _HEADS
    ),
    "head-roles": Description(
        "Which heads of the shipped model look at the previous token, at the first one, or at what "
        "followed the same word before."
    ),
    "hopper": Description(
        "Block lists on an H200, forward and backward, beside cuDNN and FlashAttention-4.", _SQUARE
    ),
    "hopper-64": Description(
        "Dense, causal and block-sparse attention with heads of 64 on an H200, beside three peers.",
        _SQUARE,
    ),
    "hopper-bias": Description(
        "Bias and token masks on an H200, beside jax.nn on XLA and on cuDNN.", _SQUARE
    ),
    "hopper-bias-2048": Description(
        "Bias and token masks on an H200 at 2,048 tokens, beside jax.nn on XLA and on cuDNN.",
        _SQUARE,
    ),
    "hopper-bias-4096": Description(
        "Bias and token masks on an H200 at 4,096 and 16,384 tokens, beside jax.nn on XLA and on "
        "cuDNN.",
        _SQUARE,
    ),
    "hopper-bias-64": Description(
        "Bias and token masks on an H200 at 2,048 and 4,096 tokens with heads of 64, beside jax.nn "
        "on XLA and on cuDNN.",
        _SQUARE,
    ),
    "hopper-bias-16384": Description(
        "A shared bias and a token mask on an H200 at 16,384 tokens with heads of 64, beside "
        "jax.nn on XLA and on cuDNN.",
        _SQUARE,
    ),
    "hopper-bias-shared": Description(
        "A bias that heads share on an H200 at 16,384 tokens with heads of 128, beside jax.nn on "
        "XLA and on cuDNN.",
        _SQUARE,
    ),
    "hopper-features": Description(
        "Windows, documents, sinks, soft caps and other options on an H200; memory.", _SQUARE
    ),
    "hopper-nsa": Description(
        "Native Sparse Attention on an H200, part by part, beside two open implementations."
    ),
    "hopper-rules": Description(
        "Causal masks, windows and packed documents on an H200, beside three peers.", _SQUARE
    ),
    "hopper-rules-documents": Description(
        "Packed documents on an H200, beside three peers.", _SQUARE
    ),
    "hopper-statistics": Description(
        "What it costs to measure entropy and block mass during the forward pass.", _CAUSAL
    ),
    "hopper-versions": Description(
        "Dense, causal and block-sparse attention on an H200 at two commits, in turns."
    ),
    "hopper-versions-tilings": Description(
        "Dense, causal and block-sparse attention on an H200 at two commits, in turns, after "
        "tilings of the forward were measured again."
    ),
    "model-h200": Description("Loading, prefill and decoding of SmolLM2-135M in bfloat16."),
    "nsa": Description("Native Sparse Attention on a CPU: time, memory and error."),
    "parallel": Description(
        "What several devices send each other, and how evenly they work.", _CAUSAL
    ),
    "parallel-h200": Description(
        "The largest device's share of the work on an H200, before and after balancing.", _CAUSAL
    ),
    "selection": Description(
        "The kernels that select blocks on an H200, and every tiling of the one that scores them."
    ),
    "shipped-hads-16": Description(
        "The shipped model, blocks of 16: HADS, fixed patterns and the oracle at equal density.",
        _HEADS,
    ),
    "shipped-hads-64": Description(
        "The shipped model, blocks of 64: HADS, fixed patterns and the oracle at equal density.",
        _HEADS,
    ),
    "shipped-selectors": Description(
        "The shipped model: ways of selecting blocks, at equal density.", _HEADS
    ),
    "smollm2-cpu": Description("SmolLM2-135M on a CPU: perplexity by two backends, and loading."),
    "sparse-training": Description(
        "The preset gpt-37m-4k trained with dense attention, with NSA and with MSA.",
        _CAUSAL,
    ),
    "tasks": Description(
        _TASKS + "plans calibrated at 8,192 tokens, at that length and at 2,048.", _HEADS
    ),
    "tasks-blocks": Description(_TASKS + "sizes of blocks, on prompts used for tuning.", _HEADS),
    "tasks-blocks-128": Description(
        _TASKS + "blocks of 128 instead of 64, on prompts that were held out.", _HEADS
    ),
    "tasks-blocks-end": Description(
        _TASKS + "blocks of 128 with a weight of the prompt's end, beside blocks of 64, on prompts "
        "that were held out.",
        _HEADS,
    ),
    "tasks-peaks": Description(
        _TASKS + "the selector that adds up the largest of every four logits, on prompts that were "
        "held out.",
        _HEADS,
    ),
    "tasks-end": Description(
        _TASKS + "budgets that weigh the end of a prompt more, on prompts that were held out.",
        _HEADS,
    ),
    "tasks-end-weights": Description(
        _TASKS + "several weights of a prompt's end, on prompts that were held out.", _HEADS
    ),
    "tasks-end-tuning": Description(
        _TASKS + "the weight of a prompt's end, on the prompts that it was chosen on.", _HEADS
    ),
    "tasks-final": Description(
        _TASKS + "HADS, sink and window, and the oracle, on prompts that were held out.", _HEADS
    ),
    "tasks-loss": Description(
        _TASKS + "budgets by the gradient of the loss, on prompts that were held out.", _HEADS
    ),
    "tasks-methods": Description(
        _TASKS + "every method on two tasks, on prompts that were held out.", _HEADS
    ),
    "tasks-selectors": Description(
        _TASKS + "ways of selecting blocks, on prompts used for tuning.", _HEADS
    ),
    "tasks-tuning": Description(
        _TASKS + "texts and costs to calibrate with, on prompts used for tuning.", _HEADS
    ),
    "tpu-estimate": Description(
        "Least times of the TPU kernels from counted work: nothing ran on a TPU.", _CAUSAL
    ),
    "train-profile": Description("Where the time of a training step goes on an H200, by kernels."),
    "train-step": Description(
        "Training steps of a GPT-2-small on an H200: dense by cuDNN, dense and HADS by XSAKE.",
        _HEADS,
    ),
    "training-37m": Description(
        "Runs of the preset gpt-37m, trained with dense attention and with HADS.",
        _HEADS,
    ),
}


def description(name: str) -> Description:
    """Of the result file with this name; without words if it is not one of the project's.

    >>> description("hopper-bias-2026-11-18").words
    'Bias and token masks on an H200, beside jax.nn on XLA and on cuDNN.'
    >>> description("mine").words
    ''
    """
    return DESCRIPTIONS.get(_DATED.sub("", name), UNKNOWN)
