#!/bin/bash
# What the cluster files run on every host: this checkout in a virtual environment, with the versions that it is tested
# with, on the PATH of every shell, login or not. Again, and with nothing new to install, it takes no time.
set -euo pipefail
umask 077
checkout=$(cd "$(dirname "$0")/../.." && pwd)
venv=~/.xpyd/venv
mkdir -p ~/.xpyd
# By hand beside `ray up`: one after the other.
exec 9>~/.xpyd/lock
flock -w 1800 9 || { echo "$(hostname): another setup.sh runs for half an hour already" >&2; exit 1; }

# The newest; but one of the head's version, where there is one: Ray lets no other join.
PATH=${PATH//"$HOME/.xpyd/venv/bin:"/} python=
for name in python3.13 python3.12 python3.11 python3; do
    found=$(command -v "$name") || continue
    python=${python:-$found}
    if [ "$("$found" -V)" = "$(cat ~/.xpyd/head-python 2>/dev/null)" ]; then python=$found; break; fi
done
[ -n "$python" ] || { echo "$(hostname): there is no python3; install Python 3.11 or later" >&2; exit 1; }
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"{sys.executable} is older than Python 3.11")'

as_root() { if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi; }
make_venv() { "$python" -m venv --clear "$venv"; }
has_ray() {  # importing it would take seconds
    "$venv/bin/python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("ray") is None)' 2>/dev/null
}

wanted=$({ cat "$checkout/pyproject.toml" "$checkout/constraints.txt"; "$python" -V; } | sha256sum)
if [ "$(cat ~/.xpyd/installed 2>/dev/null)" != "$wanted" ] || ! has_ray; then
    rm -f ~/.xpyd/installed  # until all of it is
    if ! has_ray || [ "$("$venv/bin/python" -V)" != "$("$python" -V)" ]; then
        # Debian and Ubuntu keep the pip of a new environment in a package of its own.
        package=$(basename "$(realpath "$python")")-venv
        make_venv || { as_root apt-get update -qq && as_root apt-get install -qq -y "$package" && make_venv; } || {
            echo "$(hostname): $python makes no virtual environment; install $package there, as root" >&2
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
# Whole or not at all, with the rights that it had, and where a link leads: some keep these files elsewhere.
put_on_top() {
    local new=$1.xpyd-new
    if { echo '. ~/.xpyd/env' && { [ ! -e "$1" ] || cat "$1"; }; } >"$new" &&
        { [ ! -e "$1" ] || chmod --reference="$1" "$new"; } && mv -f "$new" "$1"; then return; fi
    rm -f "$new"
    echo "$(hostname): cannot write $1; write '. ~/.xpyd/env' at its top" >&2
    exit 1
}
for profile in ~/.bashrc ~/.profile ~/.bash_profile; do
    # At the top: what comes below is often for interactive shells only. A ~/.bash_profile would hide a ~/.profile.
    if [ "$profile" = ~/.bash_profile ] && [ ! -e "$profile" ]; then continue; fi
    if grep -qs xpyd/env "$profile"; then continue; fi
    target=$(realpath -m "$profile")
    put_on_top "$target"
done
if [ -e ~/.xpyd/ray-token ]; then chmod 600 ~/.xpyd/ray-token; fi
