#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Submits a job for one node, by join.sbatch beside it, for each node that a job lacks: those that were lost or have left, and
# those that it may have besides (RESIHP_MAX_NODES). A batch script starts it beside srun, as job.sbatch does where
# RESIHP_REPLACE_WATCH is its path:
#   replace_watch.sh RUN_DIR &
# RESIHP_REPLACE has further options of sbatch. RESIHP_REPLACE_LOOK_S is how often it looks (default 15). Nothing takes node 0's
# place. When the job ends, or at SIGTERM, it cancels what still waits in the queue. SLURM kills it as soon as the batch script
# ends, or with its node. So the batch script cancels that itself, at its end and at its next start:
#   replace_watch.sh RUN_DIR cancel
set -euo pipefail

if (($# < 1)); then
    echo "usage: replace_watch.sh RUN_DIR [cancel]" >&2
    exit 2
fi
run_dir=$1
# Submitted for one node: a node that can't join is not asked for without end.
readonly MOST_TRIES=20
join=$(dirname "${BASH_SOURCE[0]}")/join.sbatch
read -ra options <<<"${RESIHP_REPLACE:-}"
declare -A job_of=() tries_of=()
submitted=$run_dir/replacements # The ids of the jobs, one per line.

# Those that run end with the job by themselves.
cancel() {
    local jobs
    [[ -f $submitted ]] || return 0
    mapfile -t jobs < <(grep -xE '[0-9]+' "$submitted")
    # Without ids scancel would take all of this user's jobs that wait.
    ((${#jobs[@]} == 0)) || scancel --quiet --state=PENDING "${jobs[@]}"
    rm -f "$submitted"
}

if [[ ${2:-} == cancel ]]; then
    cancel
    exit
fi

# The coordinator offers a place to each node that is not there (control/head/returning.py).
lacking() {
    local offer
    for offer in "$run_dir"/returning/node_*.json; do
        [[ ! -f $offer ]] || basename "$offer" .json | cut -d_ -f2
    done
}

# What has been submitted is noted first.
ends=
trap ends=1 TERM
while [[ -z $ends && ! -f $run_dir/exit_code ]]; do
    for rank in $(lacking); do
        [[ -z $ends ]] || break
        # A job that waits, or that runs and has not taken the place yet.
        if [[ -n ${job_of[$rank]:-} ]]; then
            waiting=$(squeue --noheader --jobs "${job_of[$rank]}" --format %T 2>/dev/null || true)
            [[ -z $waiting ]] || continue
        fi
        ((${tries_of[$rank]:-0} < MOST_TRIES)) || continue
        tries_of[$rank]=$((${tries_of[$rank]:-0} + 1))
        if said=$(sbatch --parsable --nodes=1 "${options[@]}" "$join" "$(basename "$run_dir")" "$rank" 2>&1); then
            job_of[$rank]=${said%%;*} # in a federation, the cluster's name follows
            # One that can't be noted would wait on for a node after the job's end.
            echo "${job_of[$rank]}" >>"$submitted" || scancel --quiet "${job_of[$rank]}" || true
            said="job ${job_of[$rank]} is to bring it"
        fi
        echo "replace_watch.sh: node $rank is not there: $said"
    done
    sleep "${RESIHP_REPLACE_LOOK_S:-15}" &
    wait $! || kill $! 2>/dev/null || true # a signal ends this, too
done
cancel
