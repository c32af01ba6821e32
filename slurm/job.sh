# What the batch scripts of this directory share. They source it in the root of the project, where sbatch was called.
# shellcheck shell=bash

fail() {
    echo "error: $1" >&2
    exit 2
}

[[ -n ${SLURM_JOB_ID:-} ]] || fail "this is no job of Slurm: sbatch $0"
[[ ! -d .venv ]] || export PATH=$PWD/.venv/bin:$PATH
export HF_HUB_OFFLINE=1 # compute nodes often have no network: models are in HF_HOME, and nothing tries to update them
cpus=${SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}
mkdir -p .dvc/tmp

command -v pgrep > /dev/null || fail "pgrep is missing (package procps): without it no signal reaches the training"

# Slurm counts every start after the first: those that this script asks for, and those after a node was lost.
restarts=${SLURM_RESTART_COUNT:-0}
max_restarts=${MAX_RESTARTS:-20}
[[ $max_restarts =~ ^-?[0-9]+$ ]] || fail "MAX_RESTARTS is $max_restarts: it must be a number"
((restarts <= max_restarts)) || fail "this job was started again $restarts times, and MAX_RESTARTS is $max_restarts"

# A project has one job at a time: two of them would edit the same params.yaml. A job that was requeued waits for the
# processes of its last start, or until the file server releases the lock of a lost node: NFS after 90 s, Lustre 150 s.
# Experiments, which are in copies of the project, and runs from a login node have locks of their own.
if [[ -z ${has_own_lock:-} ]]; then
    exec 9>> .dvc/tmp/job.lock
    flock --timeout $((restarts ? 200 : 60)) 9 || fail "job $(< .dvc/tmp/job.lock) runs in $PWD; \
submit this one with --dependency=afterany:$(< .dvc/tmp/job.lock), or from another clone"
    echo "$SLURM_JOB_ID" > .dvc/tmp/job.lock
    # DVC writes these in place: one that was killed in that moment leaves an empty file, and the next one refuses to start.
    find .dvc/tmp/rwlock dvc.lock -empty -delete 2> /dev/null || true
fi

finish() {
    rm -f .dvc/tmp/dask-"$SLURM_JOB_ID".json
    # shellcheck disable=SC2046 # several processes
    kill $(jobs -p) 2> /dev/null || true
}
trap finish EXIT

# Start a Dask cluster on all nodes of the job, for the data stages. On one node they start processes themselves.
start_dask() {
    ((SLURM_JOB_NUM_NODES > 1)) || return 0
    if ! python -c 'import distributed' 2> /dev/null; then
        echo "Dask is not installed (make setup): the data stages use this node only" >&2
        return 0
    fi
    local file=$PWD/.dvc/tmp/dask-$SLURM_JOB_ID.json interface=() runtime
    runtime=$(file=$file python -c "import os, yaml
given = yaml.safe_load(os.environ.get('PIPELINE_RUNTIME') or '{}')
print(yaml.safe_dump({'dask_scheduler': os.environ['file'], **given}))" 2> /dev/null) ||
        fail "PIPELINE_RUNTIME is $PIPELINE_RUNTIME: it must contain values of the section \`runtime\`, \
such as {nproc_per_node: 4}"
    export PIPELINE_RUNTIME=$runtime
    rm -f "$file" # of the last start of this job
    [[ -z ${DASK_INTERFACE:-} ]] || interface=(--interface "$DASK_INTERFACE")
    dask scheduler --port 0 --scheduler-file "$file" --no-dashboard "${interface[@]}" 9>&- &
    # --overlap: the workers stay until the job ends, and must not keep the nodes from the training.
    # --cpus-per-task: srun does not inherit it from sbatch.
    srun --overlap --nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpus-per-task="$cpus" \
        dask worker --scheduler-file "$file" --no-dashboard "${interface[@]}" --nworkers "$cpus" --nthreads 1 \
        --memory-limit 0 --local-directory "${TMPDIR:-/tmp}" 9>&- &
}

# Ask the stage that DVC runs to stop, and the next one if it had just ended. DVC itself would not pass a signal on.
stopped='' dvc=''
stop() {
    local stage='' last=''
    stopped=1
    while [[ -n $dvc ]] && kill -0 "$dvc" 2> /dev/null; do
        stage=$(pgrep --parent "$dvc" --full -- '-m stages\.') || true # not git, which would leave its locks
        if [[ $stage != "$last" ]]; then
            last=$stage
            # shellcheck disable=SC2086 # several processes
            kill -TERM $stage 2> /dev/null || true
        fi
        sleep 0.5
    done
}
trap stop USR1 TERM

# Run dvc on a target, or on all if it is empty. Parameters of the environment and further arguments are for
# `dvc exp run`, which writes them into params.yaml; without any, params.yaml is used as it is.
run_dvc() {
    local target=$1 parameters=() pair variable command=(dvc repro)
    shift
    for pair in TOTAL_BATCH_SIZE=total_batch_size BATCH_SIZE_PER_DEVICE=batch_size MODEL_NAME=model_name \
        SEQ_LENGTH=seq_length LEARNING_RATE=lr NUM_EPOCHS=num_epochs MAX_STEPS=max_steps; do
        variable=${pair%=*}
        [[ -z ${!variable:-} ]] || parameters+=(-S "${pair#*=}=${!variable}")
    done
    parameters+=("$@")
    ((${#parameters[@]} == 0)) || command=(dvc exp run "${parameters[@]}")
    [[ -z $target ]] || command+=("$target")
    run "${command[@]}"
}

# Run a command whose children are stages, and end with its exit status, or start again where it was interrupted.
run() {
    local status=0 printed
    echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, start $((restarts + 1)): $*"

    printed=$(stat --dereference --format=%s /dev/stderr) # the log may have the messages of earlier starts, too
    "$@" & # in the background, because bash runs a trap only between commands, or while it waits
    dvc=$!
    [[ -z $stopped ]] || stop # the signal came earlier
    wait "$dvc" || true   # until it ends, or until `stop` has stopped it
    wait "$dvc" || status=$?
    # Slurm may have killed DVC, too. The stage notices that, and needs a while to save: were this script to end now,
    # Slurm would kill the stage.
    while pgrep --pgroup 0 --full -- '-m stages\.' > /dev/null; do sleep 0.5; done

    ((status)) || return 0
    # 75: all ranks have saved, because of a signal that only they received. The launcher notices that a node is lost
    # long before Slurm does, which would start the job again by itself.
    if [[ -n $stopped || $status == 75 ]] ||
        grep -Eq 'exited with 75|^error: node .* was lost' <(tail -c +$((printed + 1)) /dev/stderr); then
        continue_later
        exit 75 # try again, as the training; DVC has made 255 of it
    fi
    exit "$status"
}

# Have Slurm start the job again, unless it may not.
continue_later() {
    # The launcher of a login node that was interrupted asks for a save, and for no other start.
    if scontrol show job "$SLURM_JOB_ID" 2> /dev/null | grep -q 'Requeue=0'; then return 0; fi
    if ((restarts >= max_restarts)); then
        echo "job $SLURM_JOB_ID was interrupted, but MAX_RESTARTS is $max_restarts: submit it again to continue" >&2
        return 0
    fi
    echo "job $SLURM_JOB_ID was interrupted: Slurm starts it again, unless it was cancelled"
    trap '' TERM USR1 # Slurm signals what is left of the last start, scontrol too, before scontrol has its answer
    # incomplete: a job that was cancelled does not come back, and one that was requeued needs nothing more.
    scontrol requeue incomplete "$SLURM_JOB_ID" || echo "error: it cannot: submit it again to continue" >&2
}
