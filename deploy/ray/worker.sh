#!/bin/bash
# Ray on a worker, started anew: worker.sh HEAD OPTION... But where Ray keeps its state in a store, one that runs what is
# installed is left alone: so a head that comes back finds its workers, and their replicas, as they were.
set -euo pipefail
head=$1 started=~/.xpyd/ray-started labels=; shift
for option; do case $option in --labels-file=*) labels=${option#*=} ;; esac; done
store=$(cat ~/.xpyd/ray-store 2>/dev/null || true)

# Since it was started: what runs, what is installed, or this host's labels. Not what each host writes into its checkout
# by itself (caches, xpyd.egg-info), which may come from another host; nor the cluster file, nor documents.
changed() {
    find ~/xpyd -name '.*' -prune -o -type f -regex '.*\.\(py\|h\|cpp\|json\|sh\)' -cnewer "$started" -print -quit
    find ~/.xpyd/installed ${labels:+"$labels"} -cnewer "$started" 2>/dev/null
}

if [ -n "$store" ] && pgrep -u "$(id -u)" -x raylet >/dev/null && [ -e "$started" ] && [ -z "$(changed)" ]; then
    echo "Ray runs here as it should"
    exit
fi
# `ray monitor CLUSTER_FILE` shows what is said here.
if [ -s ~/.xpyd/head-python ]; then
    theirs=$(cat ~/.xpyd/head-python) ours=$(~/.xpyd/venv/bin/python -V)
    if [ "$ours" != "$theirs" ]; then
        echo "$(hostname) does not join: it has $ours, the head $theirs, and Ray wants the same on all hosts" >&2
        exit 1
    fi
fi
ray stop
touch "$started"
ulimit -n 65536 || true
# After so long without its head a worker ends, with its replicas: `ray down` stops Ray on the head only (stop.sh stops
# it everywhere). With a store it is how long the head may be away.
export RAY_gcs_rpc_server_reconnect_timeout_s=$([ -n "$store" ] && echo 600 || echo 10)
export RAY_worker_niceness=0  # what Ray starts is what this host is for
exec env -u OMP_NUM_THREADS ray start --address="$head:6379" "$@"
