#!/bin/bash
# Restart Ray on a worker: worker.sh HEAD OPTION... If Ray keeps its state in a store and this worker runs what is installed,
# leave it alone, so that a restarted head finds its workers and their replicas.
set -euo pipefail
head=$1 started=~/.xpyd/ray-started labels=; shift
for option; do case $option in --labels-file=*) labels=${option#*=} ;; esac; done
store=$(cat ~/.xpyd/ray-store 2>/dev/null || true)

# Hash of what Ray here was started for and runs: the head, its token, the options, and the contents of the packages, the
# installation and this host's labels. No times, because `ray up` from another clone rewrites every file; and no files that
# a host or its operator creates, no cluster file and no documents.
what_runs() {
    local packages=(~/xpyd/*/__init__.py) file
    {
        echo "$head $*"
        {
            find "${packages[@]%/*}" -name '.*' -prune -o -type f -regex '.*\.\(py\|h\|cpp\|json\)' -print0
            for file in ~/xpyd/deploy/ray/worker.sh ~/.xpyd/{installed,env,ray-token} "$labels"; do
                if [ -e "$file" ]; then printf '%s\0' "$file"; fi
            done
        } | LC_ALL=C sort -z | xargs -0 sha256sum
    } | sha256sum
}
has_joined() {  # ignores Ray instances of other heads, and of `cluster deploy`
    local pid
    for pid in $(pgrep -u "$(id -u)" -x raylet); do
        if grep -qszFx -e "--gcs-address=$head:6379" "/proc/$pid/cmdline"; then return; fi
    done
    return 1
}

runs=$(what_runs "$@") || true
if [ -n "$store" ] && [ "$(cat "$started" 2>/dev/null)" = "$runs" ] && has_joined; then
    echo "Ray is already running with the current installation"
    exit
fi
# `ray monitor CLUSTER_FILE` shows this output.
if [ -s ~/.xpyd/head-python ]; then
    theirs=$(cat ~/.xpyd/head-python) ours=$(~/.xpyd/venv/bin/python -V)
    if [ "$ours" != "$theirs" ]; then
        echo "$(hostname) does not join: it has $ours, the head $theirs, and Ray needs the same on all hosts" >&2
        exit 1
    fi
fi
ray stop
echo "$runs" >"$started"
ulimit -n 65536 || true
# A worker without its head ends after this time, with its replicas: `ray down` stops Ray on the head only (stop.sh stops it
# everywhere). With a store, this is how long the head may be down.
export RAY_gcs_rpc_server_reconnect_timeout_s=$([ -n "$store" ] && echo 600 || echo 10)
export RAY_worker_niceness=0  # workers are this host's main load
exec env -u OMP_NUM_THREADS RAY_USAGE_STATS_ENABLED=0 ray start --address="$head:6379" "$@"
