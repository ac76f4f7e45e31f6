"""Train a tiny model with Native Sparse Attention, load what was exported, and let it continue.

python examples/train_nsa.py

On the command line: `xsake train --model.attention nsa --model.sparse.block-size 16 …`, then
`xsake generate --model runs/nsa-example/nsa`. With `--model.attention msa` an indexer learns to
select the blocks, and its loss is logged beside the model's.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from xsake.data import tokens
from xsake.model import PRESETS, Sparse, generate, huggingface
from xsake.observe import sinks
from xsake.observe.events import TrainStep
from xsake.train import loop
from xsake.train.config import Config, Data, Optimizer, Run, Schedule


def main(
    folder: Path = Path("runs/nsa-example"),
    attention: str = "nsa",
    steps: int = 60,
    length: int = 128,
    words: int = 24,
) -> list[float]:
    """Returns the loss of every step; prints some of them, and text of the trained model."""
    texts = [
        f"Cat number {i} sat on the mat and looked at cat number {i + 1}. " * 40 for i in range(9)
    ]
    tokens.tokenize(texts, tokens.train_tokenizer(texts, 300), folder / "text")
    # 4 blocks of 16 tokens for each query: the first, the last two, and one that it selects
    sparse = Sparse(block_size=16, num_selected=4)
    if attention == "nsa":
        sparse = dataclasses.replace(
            sparse, window_size=32, compression="weights", compression_block=8, compression_stride=4
        )
    model = dataclasses.replace(
        PRESETS["tiny"], vocab_size=300, attention=attention, sparse=sparse, context=2 * length
    )
    config = Config(
        model=model,
        data=Data(train=(str(folder / "text"),), length=length, rows=4),
        optimizer=Optimizer(learning_rate=3e-3),
        schedule=Schedule(steps=steps, warmup_steps=steps // 10),
        run=Run(name=attention, folder=str(folder)),
    )
    outcome = loop.train(config)
    logged = [x for x in sinks.read(outcome.folder / "events.jsonl") if isinstance(x, TrainStep)]
    for event in logged[:: max(1, steps // 5)]:
        print(f"step {event.step}: loss {event.loss_nats:.3f}, density {event.density_ratio:.2f}")

    loaded = huggingface.load(outcome.folder / "model")
    assert loaded.tokenizer is not None
    prompt = loaded.tokenizer.encode("Cat number 3 sat on")
    (row,) = generate(loaded.model, [prompt], max_tokens=words)
    print(f"Cat number 3 sat on{loaded.tokenizer.decode(row.tokens)}")
    return [x.loss_nats for x in logged if x.loss_nats is not None]


if __name__ == "__main__":
    main()
