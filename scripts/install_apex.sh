#!/usr/bin/env bash
# Builds NVIDIA apex from NVIDIA's source into .venv: FusedAdam, FusedLayerNorm, FusedRMSNorm, the multi-tensor norm and
# the fused weight gradient. PyPI is never used: its package `apex` is a different project.
#   scripts/install_apex.sh [COMMIT]      PYTHON selects the interpreter, MAX_JOBS limits parallel compilers
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

source=https://github.com/NVIDIA/apex
commit=${1:-6424da3b4faa6c8f062da4a48c424fff3f02d42d}
python=${PYTHON:-.venv/bin/python}

fail() {
    echo "install_apex.sh: $*" >&2
    exit 1
}

command -v git >/dev/null || fail "git is needed to fetch $source: install it (Debian: apt-get install git)"
command -v "$python" >/dev/null || fail "there is no interpreter '$python': run 'make venv' first, or set PYTHON"
"$python" -c 'import torch' 2>/dev/null || fail "$python has no torch, which apex is compiled against: run 'make venv' first"
cuda=$("$python" -c 'import torch; print(torch.version.cuda or "")')
hip=$("$python" -c 'import torch; print(torch.version.hip or "")')
[ -z "$hip" ] || fail "the torch of $python is built for AMD's ROCm $hip, which megacore does not support: install one with CUDA first"
[ -n "$cuda" ] || fail "the torch of $python is a build without CUDA, for which apex has no kernels: install one with CUDA first"
home=$("$python" -c 'from torch.utils.cpp_extension import CUDA_HOME; print(CUDA_HOME or "")') ||
    fail "$python cannot import torch.utils.cpp_extension (its message is above), with which apex is compiled: run 'make venv' again"
[ -x "$home/bin/nvcc" ] || fail "no CUDA compiler was found: install the CUDA toolkit $cuda and set CUDA_HOME to it"
if [ ! -e "$home/include/cuda_runtime.h" ]; then
    # The nvcc on the PATH is a script that calls the real one.
    home=$({ "$home/bin/nvcc" --dryrun -x cu /dev/null 2>&1 || true; } | sed -n 's/^#\$ TOP=//p')
    [ -e "$home/include/cuda_runtime.h" ] || fail "the CUDA toolkit of $(command -v nvcc) has no include/cuda_runtime.h: set CUDA_HOME to a complete toolkit $cuda"
    home=$(cd "$home" && pwd -P)
    export CUDA_HOME=$home
fi
version=$("$home/bin/nvcc" --version | sed -n 's/.*release \([0-9.]*\),.*/\1/p')
# apex's setup.py ends in a traceback unless both numbers are equal, major and minor.
if [ "$version" != "$cuda" ]; then
    toolkit="install the CUDA toolkit $cuda and set CUDA_HOME to it"
    [ ! -x "/usr/local/cuda-$cuda/bin/nvcc" ] || toolkit="set CUDA_HOME=/usr/local/cuda-$cuda"
    fail "torch is built for CUDA $cuda and $home/bin/nvcc is CUDA ${version:-unknown}, and apex needs the same: $toolkit, or install a torch for CUDA ${version:-of that nvcc} (make venv TORCH=...)"
fi
if [ ! -e "$home/include/cublas_v2.h" ] || [ ! -e "$home/include/cusparse.h" ]; then
    # A toolkit without the libraries: torch's CUDA packages have the same version and their headers.
    headers=$(
        "$python" - <<'EOF'
import pathlib, torch
root = pathlib.Path(torch.__file__).parents[1] / "nvidia"
found = [next(root.glob(f"*/include/{name}"), None) for name in ("cublas_v2.h", "cusparse.h")]
print("" if None in found else ":".join(dict.fromkeys(str(path.parent) for path in found)))
EOF
    )
    [ -n "$headers" ] || fail "$home has no include/cublas_v2.h or cusparse.h: install the toolkit's libraries (Debian, from NVIDIA: cuda-libraries-dev-${cuda/./-})"
    export CPATH=$headers${CPATH:+:$CPATH}
    echo "install_apex.sh: the headers of cuBLAS and cuSPARSE are those of torch's packages, $headers"
fi
compiler=${CXX:-c++}
command -v "${compiler%% *}" >/dev/null || fail "there is no C++ compiler '$compiler': install one (Debian: apt-get install g++), or set CXX"

build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT
echo "install_apex.sh: building $source at $commit for CUDA $cuda (10 to 40 minutes)"
git -C "$build" init --quiet
git -C "$build" fetch --quiet --depth 1 "$source" "$commit" || fail "$commit could not be fetched from $source: check the network and the name of the commit"
git -C "$build" checkout --quiet FETCH_HEAD
APEX_CPP_EXT=1 APEX_CUDA_EXT=1 "$python" -m pip install --no-build-isolation --no-deps --no-cache-dir "$build" ||
    fail "apex did not build (the compiler's message is above)"
"$python" - <<'EOF' || fail "apex was installed without its kernels: see the compiler's messages above"
import torch  # the extensions need its libraries
import amp_C
import fused_layer_norm_cuda
import fused_weight_gradient_mlp_cuda
EOF
echo "install_apex.sh: done; the run's log says which operations it computes"
