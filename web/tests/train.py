"""A small run that goes on until it is killed: python web/tests/train.py FOLDER, in the root."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.train.corpus import config, token_file
from xsake.data.tokens import TokenDataset
from xsake.train import loop


def main(folder: Path) -> None:
    """Trains folder/runs/live on a text in `folder`; dense at first, then with a plan."""
    text = TokenDataset.open(token_file(folder).folder)
    loop.train(
        config(
            folder / "runs",
            text,
            run__name="live",
            schedule__steps=1_000_000,
            hads__warmup_steps=20,
            hads__every=200,
            evaluation__every=50,
            checkpoint__every=500,
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
