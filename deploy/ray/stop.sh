#!/bin/bash
# On the head, before `ray down` of hosts of one's own, which stops Ray on the head only: what is deployed, and then Ray
# on every worker, by the key and the addresses that `ray up` has left here.
set -euo pipefail
cluster down
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
