#!/usr/bin/env bash
# A Slurm batch script, watched: `sbatch --export=ALL examples/slurm.sh` from the folder that this repository is in.
# EVALSTOP_URL and EVALSTOP_KEY come along from the shell that submits it.
#SBATCH --job-name=watched
#SBATCH --requeue
#SBATCH --signal=B:USR1@120

# One name for all lives of the job: a job that is requeued goes on with its run.
export EVALSTOP_RUN_NAME="$SLURM_JOB_NAME-$SLURM_JOB_ID"
# The client labels the run with slurm_job_id and slurm_cluster by itself. By these `evalstop-receiver slurm` finds the
# job, for trainers that do not look at `should_stop`; what is known of the job besides goes here.
export EVALSTOP_LABELS="gpus=${SLURM_GPUS_ON_NODE:-0},job_kind=sft"
# What cannot be sent now waits where the next life of the job finds it: not on the node's own disk.
export EVALSTOP_SPOOL="${EVALSTOP_SPOOL:-$SLURM_SUBMIT_DIR/.evalstop-spool}"

exec python "${TRAINER:-examples/plain_loop.py}"
