#!/usr/bin/env bash
# The paper's tables on a SLURM cluster: every task of the array takes runs that no other has, until none is left.
#
#     sbatch examples/slurm/reproduce.sh cifar10 init-adam --seeds 8
#
# Results and checkpoints lie below CPNORM_FOLDER, which all nodes must see; the data are found through CPNORM_DATA.
# A task saves its runs before its time is up and is put into the queue again. The runs of a task that is killed are
# taken over by the others, from their last checkpoint.
#SBATCH --job-name=cpnorm
#SBATCH --array=0-3
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=4
#SBATCH --time=01:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -uo pipefail

folder=${CPNORM_FOLDER:-$SLURM_SUBMIT_DIR}
end=${SLURM_JOB_END_TIME:-$(($(date +%s) + 3600))}
seconds=$((end - $(date +%s) - ${CPNORM_SPARE_SECONDS:-120})) # to save in

cpnorm reproduce "$@" --results "$folder/results" --work "$folder/work" --wait --time-limit "${seconds}s"
code=$?

# 75: stopped and saved, something is left. A row that fails every time must not come back for ever.
if [[ $code == 75 && ${SLURM_RESTART_COUNT:-0} -lt 50 ]]; then
    scontrol requeue "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"
fi
exit "$code"
