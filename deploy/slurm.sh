#!/bin/bash
# Trains on several nodes: sbatch deploy/slurm.sh --data.train text --mesh.fsdp 8
#
# One process per GPU; JAX reads Slurm's variables and finds the coordinator, so that xsake needs no
# address. The folder of runs must be shared by all nodes. The job is requeued when a node fails and
# when its time is over: the same command resumes from the newest checkpoint.
#SBATCH --job-name=xsake
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=xsake-%j.out
set -euo pipefail

# exit status of `xsake train` after another process was lost: start again
readonly LOST=75

status=0
# a task that fails ends the step: the others have said why, and ended, before
srun --kill-on-bad-exit=1 xsake train "$@" || status=$?
if [ "$status" -eq "$LOST" ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
