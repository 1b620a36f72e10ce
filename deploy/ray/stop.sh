#!/bin/bash
# Run on the head before `ray down` with on-prem hosts, which stops Ray on the head only. Takes deployments down, stops Ray
# on the head, whose autoscaler would restart workers, and then on every worker, with the key and addresses that `ray up`
# left here. Hosts that do not answer are reported and skipped.
set -euo pipefail
for state in "${CLUSTER_STATE_DIR:-$HOME/.local/state/xpyd}"/*/state.json; do
    [ -e "$state" ] || continue  # no deployment
    name=$(basename "$(dirname "$state")")
    cluster down --force --name "$name" || echo "$name could not be taken down: it ends with Ray" >&2
done
ray stop --force || echo "Ray on the head could not be stopped" >&2
python - <<'PY' | while read -r user address; do
import os, yaml
config = yaml.safe_load(open(os.path.expanduser("~/ray_bootstrap_config.yaml")))
for address in config["provider"]["worker_ips"]:
    print(config["auth"]["ssh_user"], address)
PY
    echo "stopping Ray on $address"
    ssh -n -i ~/ray_bootstrap_key.pem -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o ConnectTimeout=5 \
        -o LogLevel=ERROR "$user@$address" 'ray stop --force' || echo "$address does not answer" >&2
done
