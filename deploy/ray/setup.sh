#!/bin/bash
# What the cluster files run on every host: this checkout in a virtual environment, with the versions that it is tested
# with, on the PATH of every shell, login or not. Again, and with nothing new to install, it takes no time.
set -euo pipefail
umask 077
checkout=$(cd "$(dirname "$0")/../.." && pwd)
venv=~/.xpyd/venv
mkdir -p ~/.xpyd

python=$(command -v python3.13 || command -v python3.12 || command -v python3.11 || command -v python3)
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"{sys.executable} is older than Python 3.11")'

wanted=$(cat "$checkout/pyproject.toml" "$checkout/constraints.txt" | sha256sum)
if [ "$(cat ~/.xpyd/installed 2>/dev/null)" != "$wanted" ]; then
    # Debian and Ubuntu keep the pip of a new environment in a package of its own.
    "$python" -m venv "$venv" || { sudo -n apt-get install -qq -y "$(basename "$(realpath "$python")")-venv" && "$python" -m venv "$venv"; }
    "$venv/bin/pip" install --disable-pip-version-check -q --constraint "$checkout/constraints.txt" --editable "$checkout"
    echo "$wanted" >~/.xpyd/installed
fi

cat >~/.xpyd/env <<'ENV'
case :$PATH: in *:$HOME/.xpyd/venv/bin:*) ;; *) PATH=$HOME/.xpyd/venv/bin:$PATH ;; esac
export PATH RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$HOME/.xpyd/ray-token
ENV
for profile in ~/.bashrc ~/.profile ~/.bash_profile; do
    # At the top: what comes below is often for interactive shells only. A ~/.bash_profile would hide a ~/.profile.
    if [ "$profile" = ~/.bash_profile ] && [ ! -e "$profile" ]; then continue; fi
    grep -qs xpyd/env "$profile" && continue
    { echo '. ~/.xpyd/env'; cat "$profile" 2>/dev/null || true; } >"$profile.new"
    mv "$profile.new" "$profile"
done
if [ -e ~/.xpyd/ray-token ]; then chmod 600 ~/.xpyd/ray-token; fi
