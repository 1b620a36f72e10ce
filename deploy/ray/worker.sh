#!/bin/bash
# Ray on a worker, started anew: worker.sh HEAD OPTION... But where Ray keeps its state in a store, one that runs what is
# installed is left alone: so a head that comes back finds its workers, and their replicas, as they were.
set -euo pipefail
head=$1 started=~/.xpyd/ray-started labels=; shift
for option; do case $option in --labels-file=*) labels=${option#*=} ;; esac; done
store=$(cat ~/.xpyd/ray-store 2>/dev/null || true)

# What Ray here is started for and runs, as one hash: the head, its token, the options, and by their contents the
# packages, what is installed, and this host's labels. No times, for `ray up` from another clone of the same commit
# writes every file anew; nor what a host or its operator writes beside the packages, the cluster file, or documents.
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
has_joined() {  # a Ray of another head's, or one that `cluster deploy` has started here, does not count
    local pid
    for pid in $(pgrep -u "$(id -u)" -x raylet); do
        if grep -qszFx -e "--gcs-address=$head:6379" "/proc/$pid/cmdline"; then return; fi
    done
    return 1
}

runs=$(what_runs "$@") || true
if [ -n "$store" ] && [ "$(cat "$started" 2>/dev/null)" = "$runs" ] && has_joined; then
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
echo "$runs" >"$started"
ulimit -n 65536 || true
# After so long without its head a worker ends, with its replicas: `ray down` stops Ray on the head only (stop.sh stops
# it everywhere). With a store it is how long the head may be away.
export RAY_gcs_rpc_server_reconnect_timeout_s=$([ -n "$store" ] && echo 600 || echo 10)
export RAY_worker_niceness=0  # what Ray starts is what this host is for
exec env -u OMP_NUM_THREADS RAY_USAGE_STATS_ENABLED=0 ray start --address="$head:6379" "$@"
