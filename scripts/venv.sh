#!/usr/bin/env bash
# Creates .venv and installs megacore into it with the versions in constraints.txt (`make venv`).
# PYTHON selects the interpreter (default python3), CXX the C++ compiler of the extensions, TORCH another torch
# than the pinned one ('torch==2.10.*'), which later calls keep until .venv is removed or TORCH names another.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv
python=${PYTHON:-python3}
extras=dev,deepspeed
constraints=constraints.txt
chosen=$venv/torch-requirement

fail() {
    echo "make venv: $*" >&2
    exit 1
}

is_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

check_python() {
    command -v "$python" >/dev/null ||
        fail "there is no interpreter '$python': install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3.12 venv"
    is_new_enough "$python" && return
    local advice="install Python 3.11 or newer and name it: make PYTHON=/path/to/python3.12 venv" candidate
    for candidate in python3.14 python3.13 python3.12 python3.11; do
        if command -v "$candidate" >/dev/null && is_new_enough "$candidate"; then
            advice="use the newer one that is here: make PYTHON=$candidate venv"
        fi
    done
    fail "$(command -v "$python") is $("$python" --version 2>&1), but megacore needs Python 3.11 or newer: $advice"
}

check_compiler() {
    local compiler=${CXX:-}
    if [ -n "$compiler" ]; then
        command -v "${compiler%% *}" >/dev/null ||
            fail "CXX is '$compiler', which is not a program here: set CXX to a C++ compiler, or unset it to use c++ or g++"
        return
    fi
    command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null ||
        fail "no C++ compiler (c++, g++, clang++) is on the PATH, and the index helpers are compiled at install: install one (Debian: apt-get install g++)"
}

check_headers() {
    "$python" -c 'import os, sysconfig, sys; sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' ||
        fail "$(command -v "$python") comes without Python.h, which the index helpers are compiled with: install its headers (Debian: apt-get install python3-dev)"
}

make_venv() {
    if [ -x "$venv/bin/python" ] && is_new_enough "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$(command -v "$python") cannot make virtual environments (no ensurepip): install that part of it (Debian: apt-get install python3-venv) or name another interpreter: make PYTHON=/path/to/python3.12 venv"
    "$python" -m venv --clear "$venv"
}

# An installation from here would let another clone with the same .venv, such as one that a link leads to, run our code.
check_owner() {
    local other
    other=$("$python" - "$venv" <<'EOF'
import glob, json, os, sys
from urllib.parse import unquote, urlsplit

venv = sys.argv[1]
for path in glob.glob(f"{venv}/lib/python*/site-packages/megacore-*.dist-info/direct_url.json"):
    with open(path, encoding="utf-8") as file:
        other = unquote(urlsplit(json.load(file)["url"]).path)
    theirs = os.path.join(other, venv)
    shared = os.path.islink(venv) or (os.path.exists(theirs) and os.path.samefile(theirs, venv))
    if shared and os.path.isdir(other) and not os.path.samefile(other, "."):
        print(other)
EOF
    )
    [ -z "$other" ] ||
        fail "$venv is shared with $other, whose megacore is installed in it: remove the link (rm $venv) and run the same command again, which makes one for this clone"
}

# TORCH, or what an earlier call recorded, replaces the pin of torch. A torch with other requirements (setuptools<82 in
# 2.11 and 2.12) must not meet that pin, so pip chooses one that can build megacore.
choose_torch() {
    torch=${TORCH:-$(cat "$chosen" 2>/dev/null || true)}
    [ -n "$torch" ] || return 0
    local lines
    lines=$("$venv/bin/python" - "$torch" <<'EOF'
import re, sys, tomllib
from pip._vendor.packaging.requirements import InvalidRequirement, Requirement

def refuse(problem):
    sys.exit(f"make venv: TORCH is {sys.argv[1]!r}, {problem}: name a range, as in make venv TORCH='torch==2.10.*'")

try:
    wanted = Requirement(sys.argv[1])
except InvalidRequirement:
    refuse("which pip cannot read")
if wanted.name != "torch" or wanted.url or wanted.extras or wanted.marker:
    refuse("which is not a range of versions of torch")
with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)
allowed = next(r for r in map(Requirement, project["project"]["dependencies"]) if r.name == "torch")
setuptools = next(line for line in project["build-system"]["requires"] if line.startswith("setuptools"))
public = Requirement(re.sub(r"\+[^,]*", "", sys.argv[1]))  # 2.10.0+cu126 is 2.10.0
versions = (f"{a}.{b}.{c}" for a in range(1, 9) for b in range(60) for c in range(10))
if not any(v in allowed.specifier and public.specifier.contains(v) for v in versions):
    refuse(f"and megacore needs torch{allowed.specifier}")
print(wanted, setuptools, sep="\n")
with open("constraints.txt", encoding="utf-8") as file:
    print("".join(line for line in file if line.split("==")[0] not in ("torch", "setuptools")), end="")
EOF
    ) || exit 1
    echo "$lines" >"$venv/constraints.txt"
    constraints=$venv/constraints.txt
    echo "make venv: installing '$torch' instead of the pinned torch (make clean-venv forgets this choice)"
}

install() {
    # Python compiles what it imports later, which is a part of what pip would compile now.
    # Install torch first and build without isolation, so that DeepSpeed's and our builds use this torch.
    "$venv/bin/python" -m pip install --quiet --no-compile -c "$constraints" pip setuptools wheel pybind11 ninja packaging numpy "${torch:-torch}"
    DS_BUILD_OPS=0 "$venv/bin/python" -m pip install --quiet --no-compile --no-build-isolation -c "$constraints" -e ".[$extras]"
}

check_python
check_compiler
check_headers
check_owner
make_venv
choose_torch
rm -f "$venv/.installed"
echo "make venv: installing megacore[$extras] and its pinned dependencies into $venv (minutes, once)"
install || fail "pip could not install everything (its message is above): check the network and the free space, then run the same command again"
[ -z "$torch" ] || echo "$torch" >"$chosen"
touch "$venv/.installed"
echo "make venv: done, $("$venv/bin/python" --version) in $venv"
