#!/bin/bash
# Ray on a worker, started anew: worker.sh HEAD OPTION... But where Ray keeps its state in a store, one that runs what is
# installed is left alone: so a head that comes back finds its workers, and their replicas, as they were.
set -euo pipefail
head=$1 started=~/.xpyd/ray-started; shift
store=$(cat ~/.xpyd/ray-store 2>/dev/null || true)

changed() {  # since it was started: a file of the checkout, or what is installed
    find ~/xpyd ~/.xpyd/installed \( -name __pycache__ -o -name '.*_cache' \) -prune -o \
        -type f -cnewer "$started" -print -quit
}

if [ -n "$store" ] && pgrep -u "$(id -u)" -x raylet >/dev/null && [ -e "$started" ] && [ -z "$(changed)" ]; then
    echo "Ray runs here as it should"
    exit
fi
ray stop
touch "$started"
ulimit -n 65536 || true
# After so long without its head a worker ends, with its replicas: `ray down` stops Ray on the head only (stop.sh stops
# it everywhere). With a store it is how long the head may be away.
export RAY_gcs_rpc_server_reconnect_timeout_s=$([ -n "$store" ] && echo 600 || echo 10)
export RAY_worker_niceness=0  # what Ray starts is what this host is for
exec env -u OMP_NUM_THREADS ray start --address="$head:6379" "$@"
