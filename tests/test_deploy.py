"""The job scripts in deploy/ are what their schedulers read, and start commands that exist."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import tyro
import yaml

from xsake.parallel import watch
from xsake.train.config import PRESETS, Config

DEPLOY = Path(__file__).parents[1] / "deploy"

# Long options of sbatch, and what their values look like.
SBATCH = {
    "job-name": r"\S+",
    "nodes": r"\d+",
    "ntasks-per-node": r"\d+",
    "gpus-per-node": r"\d+",
    "cpus-per-task": r"\d+",
    "time": r"(\d+-)?\d+:\d\d:\d\d",
    "signal": r"(B:|R:)?[A-Z]+@\d+",
    "requeue": None,
    "open-mode": r"append|truncate",
    "output": r"\S+",
}

# The fields that JobSet v1alpha2, Job v1 and Pod v1 document, for the objects that we use, with the
# types of their values; a nested dict is an object, a list with one dict is a list of objects.
CONTAINER = {
    "name": str, "image": str, "command": [str], "args": [str],
    "env": [{"name": str, "value": str}],
    "ports": [{"containerPort": int, "name": str, "protocol": str}],
    "resources": {"limits": None, "requests": None},
    "volumeMounts": [{"name": str, "mountPath": str, "readOnly": bool}],
}  # fmt: skip
POD = {
    "restartPolicy": str, "terminationGracePeriodSeconds": int, "containers": [CONTAINER],
    "subdomain": str, "nodeSelector": None,
    "volumes": [{"name": str, "persistentVolumeClaim": {"claimName": str, "readOnly": bool}}],
}  # fmt: skip
JOB = {
    "completionMode": str, "completions": int, "parallelism": int, "backoffLimit": int,
    "template": {"metadata": None, "spec": POD},
}  # fmt: skip
JOBSET = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str, "namespace": str, "labels": None, "annotations": None},
    "spec": {
        "network": {"enableDNSHostnames": bool, "subdomain": str, "publishNotReadyAddresses": bool},
        "failurePolicy": {"maxRestarts": int, "restartStrategy": str, "rules": None},
        "successPolicy": {"operator": str, "targetReplicatedJobs": [str]},
        "startupPolicy": {"startupPolicyOrder": str},
        "suspend": bool,
        "ttlSecondsAfterFinished": int,
        "replicatedJobs": [
            {"name": str, "groupName": str, "replicas": int, "template": {"spec": JOB}}
        ],
    },
}


def wrong_fields(value, schema, path="") -> list[str]:
    """The fields that the schema does not have, or has with another type."""
    if schema is None:
        return []
    if isinstance(schema, dict):
        if not isinstance(value, dict):
            return [path]
        unknown = [f"{path}.{name}" for name in value if name not in schema]
        known = [name for name in value if name in schema]
        return unknown + [
            y for x in known for y in wrong_fields(value[x], schema[x], f"{path}.{x}")
        ]
    if isinstance(schema, list):
        if not isinstance(value, list):
            return [path]
        return [y for x in value for y in wrong_fields(x, schema[0], f"{path}[]")]
    return [] if type(value) is schema else [path]


def test_the_slurm_script_is_bash_with_options_that_sbatch_has():
    path = DEPLOY / "slurm.sh"
    subprocess.run(["bash", "-n", str(path)], check=True)
    text = path.read_text()
    options = re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", text, re.MULTILINE)
    assert len(options) == text.count("#SBATCH")  # none is written in another way
    for name, value in options:
        pattern = SBATCH[name]
        assert bool(value) == (pattern is not None), name
        assert pattern is None or re.fullmatch(pattern, value), (name, value)
    # sbatch reads options up to the first command
    assert text.rindex("#SBATCH") < text.index("set -euo pipefail")
    assert f"LOST={watch.EXIT_CODE}\n" in text


def test_the_jobset_has_documented_fields_only():
    found = yaml.safe_load((DEPLOY / "jobset.yaml").read_text())
    assert wrong_fields(found, JOBSET) == []
    assert (found["apiVersion"], found["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"spec": {"replicatedJob": []}}, [".spec.replicatedJob"]),
        ({"spec": {"failurePolicy": {"maxRestarts": "3"}}}, [".spec.failurePolicy.maxRestarts"]),
        ({"spec": {"replicatedJobs": [{"size": 1}]}}, [".spec.replicatedJobs[].size"]),
    ],
)
def test_a_wrong_field_is_found(change, wrong):
    assert wrong_fields(change, JOBSET) == wrong


def test_the_jobset_starts_as_many_processes_as_it_has_pods():
    found = yaml.safe_load((DEPLOY / "jobset.yaml").read_text())
    (job,) = found["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert spec["completions"] == spec["parallelism"]
    assert spec["completionMode"] == "Indexed"  # which sets JOB_COMPLETION_INDEX
    (container,) = spec["template"]["spec"]["containers"]
    words = shlex.split(container["args"][0].replace("$JOB_COMPLETION_INDEX", "1"))
    assert words[:3] == ["exec", "xsake", "train"]
    config = tyro.cli(Config, args=words[3:], default=PRESETS["tiny"])
    assert config.processes.count == spec["parallelism"]
    # the name of a pod: JobSet, job, number of the job, number of the pod
    name = found["metadata"]["name"]
    port = container["ports"][0]["containerPort"]
    assert config.processes.coordinator == f"{name}-{job['name']}-0-0.{name}:{port}"
    claim = spec["template"]["spec"]["volumes"][0]["name"]
    assert container["volumeMounts"][0]["name"] == claim
    assert config.run.folder.startswith(container["volumeMounts"][0]["mountPath"])
