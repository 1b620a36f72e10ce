#!/bin/bash
# Install this checkout on a host: a virtual environment with the tested versions, on the PATH of every shell. The cluster
# files run it on each host. Fast if nothing has changed.
set -euo pipefail
umask 077
checkout=$(cd "$(dirname "$0")/../.." && pwd)
venv=~/.xpyd/venv
mkdir -p ~/.xpyd
# Serialize with a manual run.
exec 9>~/.xpyd/lock
flock -w 1800 9 || { echo "$(hostname): another setup.sh has been running for half an hour" >&2; exit 1; }

# Use the newest Python, or the head's version if known: Ray needs the same on all hosts.
PATH=${PATH//"$HOME/.xpyd/venv/bin:"/} python=
for name in python3.13 python3.12 python3.11 python3; do
    found=$(command -v "$name") || continue
    python=${python:-$found}
    if [ "$("$found" -V)" = "$(cat ~/.xpyd/head-python 2>/dev/null)" ]; then python=$found; break; fi
done
[ -n "$python" ] || { echo "$(hostname): python3 not found; install Python 3.11 or later" >&2; exit 1; }
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"{sys.executable} is older than Python 3.11")'

as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi; }
make_venv() { "$python" -m venv --clear "$venv"; }
has_ray() {  # without importing it, which takes seconds
    "$venv/bin/python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("ray") is None)' 2>/dev/null
}

wanted=$({ cat "$checkout/pyproject.toml" "$checkout/constraints.txt"; "$python" -V; } | sha256sum)
if [ "$(cat ~/.xpyd/installed 2>/dev/null)" != "$wanted" ] || ! has_ray; then
    rm -f ~/.xpyd/installed  # until the installation is complete
    if ! has_ray || [ "$("$venv/bin/python" -V)" != "$("$python" -V)" ]; then
        # Debian and Ubuntu ship venv support in a separate package.
        package=$(basename "$(realpath "$python")")-venv
        make_venv || { as_root apt-get update -qq && as_root apt-get install -qq -y "$package" && make_venv; } || {
            echo "$(hostname): $python cannot create a virtual environment; install $package as root" >&2
            exit 1
        }
    fi
    "$venv/bin/pip" install --disable-pip-version-check -q --constraint "$checkout/constraints.txt" \
        --editable "$checkout"
    echo "$wanted" >~/.xpyd/installed
fi

cat >~/.xpyd/env.new <<'ENV'
case :$PATH: in *:$HOME/.xpyd/venv/bin:*) ;; *) PATH=$HOME/.xpyd/venv/bin:$PATH ;; esac
export PATH RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$HOME/.xpyd/ray-token
ENV
mv -f ~/.xpyd/env.new ~/.xpyd/env
# Replace the file atomically, keeping its mode and following links, because it may be stored elsewhere.
put_on_top() {
    local new=$1.xpyd-new
    if { echo '. ~/.xpyd/env' && { [ ! -e "$1" ] || cat "$1"; }; } >"$new" &&
        { [ ! -e "$1" ] || chmod --reference="$1" "$new"; } && mv -f "$new" "$1"; then return; fi
    rm -f "$new"
    echo "$(hostname): cannot write $1; add '. ~/.xpyd/env' at its top" >&2
    exit 1
}
for profile in ~/.bashrc ~/.profile ~/.bash_profile; do
    # At the top, because what follows is often for interactive shells only. A new ~/.bash_profile would hide
    # ~/.profile.
    if [ "$profile" = ~/.bash_profile ] && [ ! -e "$profile" ]; then continue; fi
    if grep -qs xpyd/env "$profile"; then continue; fi
    target=$(realpath -m "$profile")
    put_on_top "$target"
done
if [ -e ~/.xpyd/ray-token ]; then chmod 600 ~/.xpyd/ray-token; fi
