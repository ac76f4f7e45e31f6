"""What results were measured with: a file is resumed by a run of the same settings only.

    model, profile, dtype, …  ─ settings ─┬─ written into the file of the results
                                          └─ compared with those in a file that is resumed

Two rows of a file may therefore be compared with each other, whenever they were measured.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from xsake import _files, _jax
from xsake.hads import Plan, Profile
from xsake.hads.files import hash_of

# What hashes are of, for errors; an evaluation's documents depend on more than one flag.
WORDS = {
    "model_hash": "the model",
    "data_hash": "the documents (of --text, --seed, --length and --documents)",
    "filler_hash": "the prompts' fillers (of --text, --seed and the longest of --lengths)",
    "calibration_data_hash": "calibration text",
    "hash": "values",
    "made_from": "profile or plan",
}
ABSENT = "not known"
# whose the settings are that a file has under these names; others by label are under "others"
OWNERS = {"profile": "the profile's ", "made_from": "the profile or plan's ", "others": "--others "}


def of_run(dtype: str | None, implementation: str | None) -> dict[str, Any]:
    """The settings of a model's passes; None: the model's own dtype, the fastest backend."""
    return {
        "dtype": dtype or "the model's own",
        "implementation": implementation or f"the fastest on {_jax.platform()}",
    }


def of_subject(subject: Any) -> dict[str, Any]:
    """`of_run` of a model that is loaded; one of other packages names neither."""
    return of_run(getattr(subject, "dtype", None), getattr(subject, "implementation", None))


def of_source(made: Profile | Plan) -> dict[str, Any]:
    """What a profile or plan was made with, and a hash of its arrays."""
    if isinstance(made, Profile):
        known = {"kind": "profile", **dataclasses.asdict(made.facts)}
    else:
        known = {"kind": "plan", **dataclasses.asdict(made.terms)}
        del known["validation"], known["notes"]  # the quality that was measured; words
    del known["model_hash"]  # that of the results
    known["calibration_data_hash"] = known.pop("data_hash")
    return known | {"hash": hash_of(jax.tree.leaves(made))}


def resumed(
    out: Path, what: str, types: Mapping[str, type], settings: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The results in the file `out`, None if there is none; raises if they are of other settings.

    Args:
      out: the JSON file.
      what: it should be, for errors.
      types: of the values that it must have, by key.
      settings: of this run, all or those known so far. "others", profiles by label, are compared
        where the file has the label.
    """
    if not out.is_file():
        return None
    found = _files.read_record(out, what, types)
    given = json.loads(json.dumps(settings))  # tuples become lists, as in the file
    if differing := _differing(found, given):
        raise ValueError(
            f"{out} was measured with other settings: {'; '.join(differing)}; name another file, "
            "or give the settings of this one"
        )
    if missing := [WORDS.get(name, name) for name in given if name not in found]:
        raise ValueError(
            f"{out} does not record its {', '.join(missing)}, so that its results may be those of "
            "other settings (an earlier version wrote it); name another file"
        )
    return found


def _differing(found: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """The settings that both have and that differ, in words."""
    words = []
    for name in (x for x in given if x in found):
        if name == "others":
            for label in (x for x in given[name] if x in found[name]):
                owner = f"{OWNERS[name]}{label}'s "
                words += _differing_values(found[name][label], given[name][label], owner)
        elif name in OWNERS:
            words += _differing_values(found[name], given[name], OWNERS[name])
        elif found[name] != given[name]:
            words.append(_words(name, found, given))
    # a file may have one setting in two places, as that of the run and as that of a profile
    return [x for x in words if not any(other.endswith(f" {x}") for other in words)]


def _differing_values(found: Mapping[str, Any], given: Mapping[str, Any], owner: str) -> list[str]:
    """What differs between two profiles or plans, in words; if they are equal, nothing."""
    names = [x for x in {**found, **given} if found.get(x, ABSENT) != given.get(x, ABSENT)]
    if len(names) > 1:  # the values differ if anything else does
        names = [x for x in names if x != "hash"]
    return [owner + _words(name, found, given) for name in names]


def _words(name: str, found: Mapping[str, Any], given: Mapping[str, Any]) -> str:
    if name in WORDS:
        return WORDS[name]
    there, here = (repr(x[name]) if name in x else ABSENT for x in (found, given))
    return f"{name.replace('_', ' ')} {there} there, {here} here"
