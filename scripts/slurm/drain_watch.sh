#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes nodes that SLURM is draining leave the job in order. Polls SLURM for them until the job has ended. A batch script starts
# it beside srun, as job.sbatch does where RESIHP_DRAIN_WATCH is its path:
#   drain_watch.sh RUN_DIR [FIRST_RANK] &
# FIRST_RANK is the rank of this allocation's first node (default 0). `resihp` is in PATH. RESIHP_DRAIN_LOOK_S is how often it
# asks (default 15). Node 0 has the coordinator and stays.
set -euo pipefail

if (($# < 1)); then
    echo "usage: drain_watch.sh RUN_DIR [FIRST_RANK]" >&2
    exit 2
fi
run_dir=$1
read -ra container <<<"${RESIHP_CONTAINER:-}"
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
declare -A rank_of=() said=()
for at in "${!hosts[@]}"; do
    rank_of[${hosts[at]}]=$((${2:-0} + at))
done

# A node is listed once for each partition that it is in.
draining() {
    sinfo --all --noheader --Node --nodes "$SLURM_JOB_NODELIST" --format "%N %T" |
        while read -r host state; do
            [[ $state != @(drain|fail)* ]] || echo "$host"
        done | sort -u
}

while [[ ! -f $run_dir/exit_code ]]; do
    for host in $(draining || true); do
        rank=${rank_of[$host]:-}
        # What was asked for once is on its way. What was refused is asked for again: the job may not have begun to train.
        [[ -n $rank && ${said[$host]:-} != done ]] || continue
        if ((rank == 0)); then
            answer="node 0 has the coordinator, and stays"
            outcome=done
        elif answer=$("${container[@]}" resihp drain "$run_dir" "node:$rank" 2>&1); then
            outcome=done
        else
            outcome=$answer
        fi
        [[ $outcome == "${said[$host]:-}" ]] || echo "drain_watch.sh: SLURM drains $host: $answer"
        said[$host]=$outcome
    done
    sleep "${RESIHP_DRAIN_LOOK_S:-15}"
done
