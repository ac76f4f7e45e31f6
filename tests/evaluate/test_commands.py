"""xsake calibrate, plan, evaluate and generate, as they are typed."""

import dataclasses
import itertools
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from flax import nnx

from tests.commands import caller
from tests.hads.test_plan import profile_of
from xsake.bench import method_times
from xsake.bench.timing import Timing
from xsake.cli import model_path, tasks
from xsake.data import tokens
from xsake.data.tasks import FAMILIES
from xsake.evaluate import needle, table
from xsake.hads import Plan, Profile, make
from xsake.model import Config, Transformer, huggingface
from xsake.model.generate import Completion
from xsake.model.observer import Observer

TINY = Config(
    vocab_size=300,
    context=128,
    layers=1,
    width=16,
    heads=2,
    kv_heads=1,
    head_size=8,
    mlp_width=16,
    bos=0,
    eos=(0,),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a checkpoint, another one, and tokenized documents."""
    folder = tmp_path_factory.mktemp("made")
    tokenizer = tokens.train_tokenizer(["It was a dark and stormy night. " * 9], 300)
    huggingface.save(folder / "model", Transformer(TINY, rngs=nnx.Rngs(0)), tokenizer)
    huggingface.save(folder / "other", Transformer(TINY, rngs=nnx.Rngs(1)), tokenizer)
    ids = np.random.default_rng(0).integers(0, 300, (2, 64), dtype=np.int32)
    for name, values in (
        ("ids", ids),
        ("more", ids[::-1]),
        ("above", ids + 1000 * (np.arange(64) == 7)),
        ("below", ids - 1000 * (np.arange(64) == 7)),
        ("huge", ids.astype(np.int64) + 2**40),
        ("flat", ids[0]),
        ("float", ids / 2),
    ):
        np.save(folder / f"{name}.npy", values)
    (folder / "empty.npy").write_bytes(b"")
    (folder / "file").write_text("x")
    (folder / "lines.jsonl").write_text('{"body": "It was a dark and stormy night."}\n')
    (folder / "words.txt").write_text("It was a dark and stormy night. " * 100)
    return folder


@pytest.fixture
def xsake(made, monkeypatch, capsys):
    """Runs a command line among the files; returns its output."""
    monkeypatch.chdir(made)
    return caller(monkeypatch, capsys)


def once(function):
    """The function, called once; later calls get the same result without compiling again."""
    found = []

    def call(*given):
        if not found:
            found.append(function(*given))
        return found[0]

    return call


CALIBRATE = (
    "calibrate model --text ids.npy --length 64 --documents 2 --block 16 "
    "--selectors static mean_query"
)


def test_calibrate_plan_evaluate(xsake, made, monkeypatch):
    """From a checkpoint and documents to a plan with its measured quality, and to text."""
    times = {"dense": Timing((0.004,)), "mean_query/kl": Timing((0.003,))}
    monkeypatch.setattr(method_times, "time_attention", lambda *given: times)
    monkeypatch.setattr(table, "measure_methods", once(table.measure_methods))
    said = xsake(f"{CALIBRATE} -o a/new/profile")
    assert "calibrating on 2 documents of 64 tokens\ncompiling\n1 of 2 documents of 64" in said
    assert "budget correlation" in said
    assert Profile.load(made / "a" / "new" / "profile").facts.dtype == "float32"
    assert [x.name for x in (made / "a" / "new").iterdir()] == ["profile"]
    said = xsake("plan a/new/profile --density 0.8 --policy kl -o plan")
    assert "realised density 0.8000" in said
    said = xsake("plan a/new/profile --density 0.8 --policy loss -o lossy", code=1)
    assert "`xsake calibrate --loss`" in said
    before = (made / "plan").read_bytes()
    evaluate = "evaluate model --plan plan --text more.npy --length 64 --documents 2"
    said = xsake(f"{evaluate} --update".replace("more", "ids"), code=1)
    assert "are those of the calibration, and quality must be measured on text that was" in said
    said = xsake(evaluate)
    assert "mean_query/kl" in said
    gap = r"mean gap of the documents: [+-][\d.]+% ± [\d.]+% \(standard error over 2 documents\)"
    assert re.search(rf"\nperplexity [\d.]+ dense, [\d.]+ with the plan; {gap}\n", said)
    assert "4.0 ms dense, 3.0 ms with the plan, 0.75 of dense" in said
    assert (made / "plan").read_bytes() == before
    assert "written: plan" in xsake(f"{evaluate} --update")
    measured = Plan.load(made / "plan").terms.validation
    assert '"perplexity_gap"' in measured
    assert '"documents": 2' in measured
    assert "the plan is for model" in xsake(evaluate.replace("model", "other", 1), code=1)
    (made / "a" / "new" / "profile").unlink()


def test_an_interrupted_calibration_is_one_line(xsake, monkeypatch):
    """The line names the file that keeps the finished documents."""
    asked = []

    def interrupted(self, documents, *, report, partial, **how):
        asked.append(partial)
        partial.documents = 1
        report(1)
        raise KeyboardInterrupt

    monkeypatch.setattr(Observer, "profile", interrupted)
    said = xsake(f"{CALIBRATE} -o b/profile", code=130)
    assert said.splitlines()[-1] == (
        "xsake: stopped by Ctrl-C; b/profile.partial keeps 1 of 2 documents; "
        "run the same command again to continue"
    )
    assert asked[0].settings == {"dtype": "float32", "implementation": None}


@pytest.mark.parametrize("after", [0, 1])
def test_an_interrupted_table_or_file_of_tasks_is_one_line(xsake, made, monkeypatch, after):
    """The line names the file, if there is one: of a table after its first density."""
    profile_of_the_model(made).save(made / "random")
    calls = []

    def interrupted(*given, **how):
        calls.append(given)
        if len(calls) > after:
            raise KeyboardInterrupt
        return []

    monkeypatch.setattr(table, "measure_methods", interrupted)
    monkeypatch.setattr(needle, "LEAST_ACCURACY", 0.0)
    measured = needle._measure

    def stopped(*given):
        yield from itertools.islice(measured(*given), 2 * after)
        raise KeyboardInterrupt

    monkeypatch.setattr(needle, "_measure", stopped)
    evaluate = (
        "evaluate model --profile random --text more.npy --length 64 --documents 2 "
        "--densities 0.8 0.9 --methods sink_window --table"
    )
    for line, name, what in (
        (f"{evaluate} stopped{after}", f"stopped{after}", "the densities"),
        (f"{TASKS} stopped-tasks{after}", f"stopped-tasks{after}", "the cells"),
    ):
        said = xsake(line, code=130).splitlines()[-1]
        assert (made / name).exists() is bool(after)
        kept = f"; {name} has {what} that were finished; run the same command again to continue"
        assert said == "xsake: stopped by Ctrl-C" + kept * after


def profile_of_the_model(made):
    """A profile of random statistics that names the model; 8 row blocks of 16."""
    found = profile_of(1, 2)
    subject = Observer(huggingface.load(made / "model", tokenizer=False).model)
    return dataclasses.replace(
        found, facts=dataclasses.replace(found.facts, model_hash=subject.hash)
    )


TASKS = (
    "evaluate model --text words.txt --profile random --families passkey --lengths 128 "
    "--prompts 2 --densities 0.1 0.8 --methods mean_query/output sink_window --tasks"
)


def test_tasks_of_a_profile(xsake, made, monkeypatch):
    """The untrained model knows no answer: without the rule it is measured, with it left out."""
    random = profile_of_the_model(made)
    random.save(made / "random")
    with monkeypatch.context() as patched:
        patched.setattr(needle, "LEAST_ACCURACY", 0.0)
        said = xsake(f"{TASKS} tasks.json --certify 0")
    assert "written: tasks.json" in said
    assert "\n128 tokens: % of answers right; mean difference to dense\n" in said
    assert "left out at 128 tokens: density 0.1 is below " in said
    assert re.search(r"\nmean_query/output certified, error 0\n     1.00        0 ", said)
    found = json.loads((made / "tasks.json").read_text())
    certified = "mean_query/output certified, error 0"
    methods = ["dense", "sink_window", "mean_query/output", certified]
    assert [row["method"] for row in found["rows"]] == methods
    # threshold 0: every row block is done densely
    assert found["rows"][-1]["realised_density_ratio"] == 1
    assert found["rows"][-1]["loss_difference"] == pytest.approx(0, abs=1e-4)
    assert found["provenance"]["versions"]["jax"]
    assert found["rows"][1]["realised_density_ratio"] == pytest.approx(0.8, abs=0.01)
    said = xsake(f"{TASKS} tasks.json --certify 0")  # resumes: nothing is measured again
    assert "left out: passkey at 128 tokens, where dense attention has 0% of the answers" in said
    assert json.loads((made / "tasks.json").read_text())["rows"] == found["rows"]
    facts = dataclasses.replace(random.facts, data_hash=found["filler_hash"])
    dataclasses.replace(random, facts=facts).save(made / "random")
    assert "are those of the calibration" in xsake(f"{TASKS} other.json", code=1)


def test_tasks_of_other_settings_are_refused_before_the_model_is_loaded(xsake, made, monkeypatch):
    random = profile_of_the_model(made)
    random.save(made / "random")
    with monkeypatch.context() as patched:
        patched.setattr(needle, "LEAST_ACCURACY", 0.0)
        xsake(f"{TASKS} settings.json")
    before = (made / "settings.json").read_bytes()
    facts = dataclasses.replace(random.facts, band=1)
    dataclasses.replace(random, facts=facts).save(made / "banded")
    banded = TASKS.replace("random", "banded").replace("0.1 0.8", "0.5")
    assert "128 tokens: density 0.5 is below 0.584, that of the forced" in xsake(f"{banded} b.json")
    monkeypatch.setattr(huggingface, "load", None)
    for line, said in (
        (TASKS.replace("sink_window", "magic") + " magic.json", "magic"),
        (f"{TASKS} settings.json --dtype bfloat16", "dtype 'float32' there, 'bfloat16' here"),
        (f"{TASKS} settings.json --implementation xla", "'the fastest on cpu' there, 'xla' here"),
        (
            f"{TASKS} settings.json --profile banded",
            "the profile or plan's band 0 there, 1 here; name",
        ),
    ):
        assert said in xsake(line, code=1)
    assert (made / "settings.json").read_bytes() == before
    assert not (made / "magic.json").exists()


def test_a_table_of_other_settings_is_refused_before_the_model_is_loaded(xsake, made, monkeypatch):
    profile_of_the_model(made).save(made / "random")
    line = (
        "evaluate model --profile random --text more.npy --length 64 --documents 2 "
        "--densities 0.2 0.9 --methods sink_window --table table.json"
    )
    said = xsake(line)
    assert "left out: density 0.2 is below 0.700, that of the forced blocks alone" in said
    monkeypatch.setattr(huggingface, "load", None)
    said = xsake(f"{line} --dtype bfloat16", code=1)
    assert "table.json was measured with other settings: dtype 'float32' there, 'bfloat16'" in said
    said = xsake(f"{line} --others elsewhere=random", code=1)
    assert "--others elsewhere=random is not used by --methods sink_window; name a method" in said
    line = line.replace("--methods sink_window ", "")
    assert "--others takes LABEL=FILE, got '=random'" in xsake(f"{line} --others =random", code=1)
    said = xsake(f"{line} --others a=random a=random", code=1)
    assert "--others has the label 'a' twice; name them differently" in said


def test_a_profile_and_a_plan_do_not_replace_each_other(xsake, made, monkeypatch):
    """Nor any other file; refused before any work. A plan may replace a plan."""
    profile_of(1, 2).save(made / "kept")
    (made / "alias").symlink_to("kept")
    plan = "plan kept --density 0.8 -o"
    xsake(f"{plan} made-plan")
    xsake(f"{plan} made-plan")
    (made / "touched").touch()
    xsake(f"{plan} touched")
    monkeypatch.setattr(Profile, "load", None)
    monkeypatch.setattr(huggingface, "load", None)
    before = {name: (made / name).read_bytes() for name in ("kept", "made-plan", "file")}
    for line, said in (
        (f"{plan} kept", "kept is read by this command, and a plan would replace it; name another"),
        (f"{plan} alias", "alias is read by this command, and a plan would replace it"),
        (f"{plan} file", "file is another kind of file, and a plan would replace it"),
        (f"{CALIBRATE} -o made-plan", "made-plan is a plan, and a profile would replace it; name"),
        (f"{CALIBRATE} -o ids.npy", "ids.npy is read by this command, and a profile would"),
    ):
        assert said in xsake(line, code=1)
    assert before == {name: (made / name).read_bytes() for name in before}


def test_a_plan_with_top_p_says_so_and_is_measured_on_text(xsake, made, monkeypatch):
    profile_of_the_model(made).save(made / "some")
    said = xsake("plan some --density 0.9 --top-p 0.25 -o limited")
    assert "top_p 0.25: a row block stops at this share of its estimated mass; these" in said
    evaluate = "evaluate model --plan limited --length 128"
    said = xsake(f"{evaluate} --text words.txt --documents 1")
    density = float(re.search(r"mean_query/output, top_p 0.25 +([\d.]+)", said)[1])
    assert density < 0.85
    assert "ms with the plan" in said
    monkeypatch.setattr(huggingface, "load", None)
    said = xsake("evaluate model --plan limited --text words.txt --tasks t.json", code=1)
    assert "that of a plan with --top-p depends on the input; give a plan without it" in said
    assert not (made / "t.json").exists()


def test_the_table_of_tasks_fits_80_columns():
    """With all families, and with the longest name of a method: numbers are not folded."""
    families = [*FAMILIES]
    name = "outlier_queries/output, end × 16 certified, error 0.2"
    row = {"length": 8192, "accuracy": 1.0, "accuracy_difference": -1.0, "loss_difference": 1.0}
    row |= {"accuracy_difference_standard_error": 0.123, "loss_difference_standard_error": 0.1}
    rows = [
        row | {"family": family, "method": method, "density": density}
        for family in families
        for method, density in (("dense", 1.0), (name, 0.2), (name, 0.43), ("sink_window", 0.2))
    ]
    lines = tasks._lines(rows, 8192)
    assert max(map(len, lines)) <= 80
    assert lines[2].split() == ["density", *" ".join(families).replace("_", " ").split(), "mean"]
    numbers = ["100"] * len(families)
    assert [x.split() for x in lines[3:5]] == [["dense"], ["1.00", *numbers]]
    assert lines[5] == name
    assert lines[6].split() == ["0.20", *numbers, "-100.0", "±", "5.0"]
    assert [x.split()[0] for x in lines[7:]] == ["0.43", "sink_window", "0.20"]


def test_calibration_on_two_kinds_of_text(xsake, made, monkeypatch):
    """Half of the documents get facts and questions, and the profile and its plans say so."""
    asked = []

    def profiled(self, documents, *, kinds, partial, loss, **how):
        asked.append(documents)
        assert loss == (len(asked) == 2)
        partial.path.touch()
        found = profile_of(1, 2)
        facts = dataclasses.replace(found.facts, kinds=kinds)
        return dataclasses.replace(found, errors={"entropy": np.full((1, 2), 0.1)}, facts=facts)

    monkeypatch.setattr(Observer, "profile", profiled)
    line = "calibrate model --text words.txt --length 128 --documents 4 --block 16 -o c/profile"
    xsake(line)
    assert not Profile.load(made / "c" / "profile").facts.kinds
    xsake(f"{line} --retrieval 0.5 --loss")
    plain, mixed = asked
    assert [(x == y).all() for x, y in zip(plain, mixed, strict=True)] == [True, True, False, False]
    assert {len(x) for x in mixed} == {128}
    said = xsake("plan c/profile --density 0.8 -o c/plan")
    assert "calibrated on 2 documents of plain text and 2 with facts and questions" in said


def test_a_plan_may_weigh_the_end_of_a_text(xsake, made):
    profile = profile_of(1, 2)
    profile.save(made / "some")
    said = xsake("plan some --density 0.6 --end-weight 16 -o weighted")
    assert "the last 2 row blocks count 16 ×" in said
    wanted = make(profile, 0.6, end_weight=16.0)
    np.testing.assert_array_equal(Plan.load(made / "weighted").counts, wanted.counts)
    assert (wanted.counts != make(profile, 0.6).counts).any()
    said = xsake("plan some --density 0.6 --end-weight 0 -o weighted", code=1)
    assert "end_weight must be a number from 1e-06 to 1e+06, got 0.0" in said


COUNTS = np.array([[[1, 2, 3, 4], [1, 2, 2, 2]]], np.int32)  # of a plan


def test_a_plan_gives_the_mask_of_the_prompt_and_the_budget_of_the_cache(xsake, made, monkeypatch):
    plan = Plan(COUNTS, None, terms(made))
    plan.save(made / "small")
    asked = {}

    def stub(model, prompts, **options):
        asked.update(options)
        yield [Completion([5, 6], "length")]

    monkeypatch.setattr("xsake.model.stream", stub)
    assert "2 new tokens" in xsake("generate --model model --prompt 'It was' --plan small")
    assert asked["mask"].terms == plan.terms
    np.testing.assert_allclose(asked["budget"].mean(), 0.75, atol=1e-3)
    assert asked["budget"][0, 0] == 2 * asked["budget"][0, 1]
    said = xsake("generate --model other --prompt a --plan small", code=1)
    assert "the plan is for model" in said


def terms(made):
    from xsake.hads.terms import Terms

    subject = Observer(huggingface.load(made / "model", tokenizer=False).model)
    return Terms(0.75, "kl", "mean_query", 64, 256, model_hash=subject.hash)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"{CALIBRATE} -o p --block -16", "--block must be at least 1, got -16"),
        (f"{CALIBRATE} -o p --length -5", "--length must be at least 1, got -5"),
        (f"{CALIBRATE} -o p --documents 0", "--documents must be at least 1, got 0"),
        (f"{CALIBRATE} -o p --documents -1", "--documents must be at least 1, got -1"),
        (f"{CALIBRATE} -o p --band -1", "--band must be at least 0, got -1"),
        (f"{CALIBRATE} nope -o p", "--selectors 'nope' is not one of static, pooled"),
        (f"{CALIBRATE} -o p --selectors", "--selectors names none; name some of static"),
        (f"{CALIBRATE} -o .", ". is a folder; name a file to write"),
        (f"{CALIBRATE} -o file/p", "the folder file cannot be made (File exists)"),
        (f"{CALIBRATE} -o p --text gone.npy", "there is no file gone.npy"),
        (f"{CALIBRATE} -o p --text empty.npy", "empty.npy is not an .npy file of token ids"),
        (f"{CALIBRATE} -o p --text flat.npy", "must be the only file and hold an int"),
        (f"{CALIBRATE} -o p --text float.npy", "must be the only file and hold an int"),
        (f"{CALIBRATE} -o p --text huge.npy", "token ids that do not fit 32 bits"),
        (f"{CALIBRATE} -o p --text above.npy", "outside 0 … 299 of the model's vocabulary"),
        (f"{CALIBRATE} -o p --length 200", "documents of 200 tokens exceed the model's context"),
        ("plan gone --density 0.5 -o q", "gone cannot be read as a profile"),
        ("plan gone --density 0.5 -o file/q", "the folder file cannot be made"),
        ("evaluate model --text ids.npy", "give either --plan, or --profile and --table"),
        ("evaluate model --text ids.npy --plan q --length 1", "--length must be at least 2"),
        ("evaluate model --text ids.npy --plan q --documents 0", "--documents must be at least 1"),
        ("evaluate model --text ids.npy --profile q --table t.md", "--table t.md is the JSON file"),
        ("evaluate model --text ids.npy --profile q --table t --densities", "--densities names no"),
        ("evaluate model --text ids.npy --profile q --table t --densities nan", "got nan"),
        ("evaluate model --text ids.npy --profile q --table t --methods", "--methods names none"),
        ("evaluate model --text ids.npy --profile q --table t --lengths 64", "--lengths is not us"),
        (
            "evaluate model --text ids.npy --plan q --methods a",
            "--methods is not used here: --plan",
        ),
        ("evaluate model --text ids.npy --plan q --densities 0.5", "--densities is not used here"),
        ("evaluate model --text ids.npy --plan q --others a=b", "--others is not used here: --pl"),
        (
            "evaluate gone --text ids.npy --plan q --implementation nope",
            "--implementation 'nope' is",
        ),
        (f"{CALIBRATE} -o p --implementation nope", "--implementation 'nope' is not one of ["),
        (f"{CALIBRATE} -o p --text lines.jsonl", "give every line an object whose 'text' is the"),
        (f"{CALIBRATE} -o p --mesh.fsdp -1", "xsake: mesh.fsdp must not be negative, got -1"),
        (f"{CALIBRATE} -o p --retrieval nan", "--retrieval must be a share from 0 to 1 of"),
        (f"{TASKS} t --others a=b", "--others is not used here: --tasks has --lengths"),
        ("evaluate model --text ids.npy --profile q --table t --update", "--update adds to the"),
        (f"{CALIBRATE} -o p --retrieval 1.5", "--retrieval must be a share from 0 to 1 of"),
        (f"{CALIBRATE} -o p --retrieval 0.1", "and at least one of them, got 0.1 of 2"),
        (f"{CALIBRATE} -o p --retrieval 0.5", "--retrieval adds words to text, and ids.npy holds"),
        (f"{TASKS} t.md", "--tasks t.md is the JSON file"),
        (f"{TASKS} t --families", "--families names none; leave it out"),
        (f"{TASKS} t --families nope", "--families 'nope' is not one of passkey, needles"),
        (f"{TASKS} t --lengths 1", "--lengths must be at least 2, got 1"),
        (f"{TASKS} t --prompts 0", "--prompts must be at least 1, got 0"),
        (
            f"{CALIBRATE} -o p --band 4",
            "64 tokens are 4 row blocks of 16, and with a band of 4 all",
        ),
        (f"{TASKS} t --densities 2", "--densities must be above 0 and at most 1, got 2.0"),
        (f"{TASKS} t --text ids.npy", "--tasks hides words in text, and ids.npy holds token ids"),
        (f"{TASKS} t --certify -1", "--certify is a share of the output, at least 0, got -1.0"),
        (
            "evaluate model --text ids.npy --plan q --certify 0.1",
            "--certify is not used here: leave it out, or give --tasks",
        ),
        (f"{TASKS} t --documents 3", "--documents is not used here: --tasks has --lengths and"),
        (f"{TASKS} t --table u", "with --tasks, --plan or --profile only"),
        (f"{TASKS} t --update", "--update adds perplexity to a plan; leave it out with --tasks"),
        ("generate --model gone --prompt a", "there is no checkpoint gone"),
        ("generate --model model --prompt a --plan p --density 0.5", "--plan and --density are"),
        ("generate --model model --prompt a --plan gone", "gone cannot be read as a plan"),
        ("inspect file", "file is neither a folder nor a .gguf file"),
    ],
)
def test_a_wrong_call_is_one_sentence(xsake, made, line, said):
    printed = xsake(line, code=1)
    assert said in printed
    assert printed.splitlines()[-1].startswith("xsake: ")
    assert not (made / "p").exists()


def test_a_method_or_a_length_that_cannot_be_measured_is_named(xsake, made):
    profile_of_the_model(made).save(made / "random")
    said = xsake(f"{TASKS} t.json --lengths 64 999", code=1)
    assert "--lengths has 999, but the model's context is 128 tokens" in said
    said = xsake(f"{TASKS} t.json --methods gaussian/kl", code=1)
    assert "method 'gaussian/kl' needs a cost curve that the profile lacks" in said
    said = xsake(f"{TASKS} t.json --methods nope", code=1)
    assert "method 'nope' does not exist; those that can be measured are ['sliding_window'" in said


def test_ids_outside_the_vocabulary_are_not_measured(xsake, made):
    Plan(COUNTS, None, terms(made)).save(made / "ids-plan")
    for name in ("above", "below"):
        wrong = np.load(made / f"{name}.npy")[0, 7]
        said = xsake(
            f"evaluate model --plan ids-plan --text {name}.npy --length 64 --documents 2", code=1
        )
        assert f"{name}.npy has the token id {wrong}" in said


def test_a_model_is_a_path_or_shipped_or_the_folder_of_a_run(made, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert model_path.checkpoint(made / "model") == made / "model"
    assert (model_path.checkpoint(Path("shipped")) / "model.safetensors").is_file()
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    (run / "config.json").write_text("{}")
    (run / "events.jsonl").touch()
    with pytest.raises(FileNotFoundError, match="is a training run without the folder"):
        model_path.checkpoint(run)
    shutil.copytree(made / "model", run / "model")
    assert model_path.checkpoint(run) == run / "model"
