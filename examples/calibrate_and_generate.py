"""A checkpoint from calibration to text: calibrate, plan, evaluate, generate.

python examples/calibrate_and_generate.py

The shipped model stands for your checkpoint: `huggingface.load` reads any folder of safetensors or
GGUF file. The commands `xsake calibrate`, `plan`, `evaluate` and `generate` do the same.
"""

from __future__ import annotations

from pathlib import Path

from xsake import hads, shipped
from xsake.data.documents import load_documents
from xsake.evaluate.methods import at_density, of_plan
from xsake.evaluate.quality import paired_gap
from xsake.evaluate.table import measure_losses
from xsake.model import generate, huggingface
from xsake.model.observer import Observer


def main(
    length: int = 2048, block: int = 64, density: float = 0.3, documents: int = 3, words: int = 40
) -> dict[str, float]:
    """Prints the plan, its loss of quality beside sink + window, and text; returns the gaps."""
    loaded = huggingface.load(shipped.FOLDER)
    model, tokenizer = loaded.model, loaded.tokenizer
    assert tokenizer is not None
    subject = Observer(model)

    # calibrate: how is the attention of each head distributed over blocks?
    calibration = load_documents([shipped.CALIBRATION_TEXT], tokenizer.encode, length, documents)
    profile = subject.profile(calibration, block=block, curves=("mean_query",))

    # plan: split the budget over heads; blocks are selected from each input at run time
    plan = hads.make(profile, density, policy="output", selector="mean_query")
    plan.save("plan.safetensors")
    print(plan)

    # evaluate on other text, beside a fixed pattern with the same number of blocks
    held_out = load_documents([shipped.HELD_OUT_TEXT], tokenizer.encode, length, documents)
    fixed = next(x for x in at_density(profile, density, length) if x.name == "sink_window")
    losses, dense = measure_losses(subject, [of_plan(plan, length), fixed], held_out, block)
    gaps = {
        name: paired_gap(loss, dense)[0]
        for name, loss in zip(("HADS", "sink + window"), losses, strict=True)
    }
    for name, gap in gaps.items():
        print(f"{name:14} perplexity {gap:+.2%} against dense attention")

    # generate: the prompt is read under the plan
    plan = hads.Plan.load(Path("plan.safetensors"), subject.hash)
    prompt = tokenizer.encode("It was a dark and stormy night; the captain")
    (text,) = generate(model, [prompt], max_tokens=words, mask=plan)
    print(tokenizer.decode([*prompt, *text.tokens]))
    return gaps


if __name__ == "__main__":
    main()
