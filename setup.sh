#!/usr/bin/env bash
# Sets up work on this tree: what Debian must bring, CUDA's compiler where a card is but no nvcc, and build/venv with
# bsjax installed in place. Done already, it does nothing twice. PYTHON names the interpreter (default: python3).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

PYTHON=${PYTHON:-python3}
UV=build/uv/bin/uv
export UV_PYTHON_DOWNLOADS=never # the interpreters are this machine's

say() { printf '\n== %s\n' "$*"; }

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }

# Debian's packages that are missing: Bazel and the rules that it loads, a compiler, the interpreter's headers and venv.
install_system_packages() {
  local missing=()
  if [[ -z ${BAZEL:-} ]] && ! command -v bazel-4 bazelisk bazel >/dev/null; then
    missing+=(bazel-bootstrap bazel-rules-java bazel-rules-proto bazel-skylib bazel-platforms)
  fi
  command -v g++ >/dev/null || missing+=(g++)
  command -v git >/dev/null || missing+=(git)
  "$PYTHON" -c 'import sysconfig; open(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null || missing+=(python3-dev)
  "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
  if ((${#missing[@]})); then
    say "Debian's packages: ${missing[*]}"
    local root=()
    ((EUID == 0)) || root=(sudo)
    "${root[@]}" apt-get update -qq
    DEBIAN_FRONTEND=noninteractive "${root[@]}" apt-get install -qq -y --no-install-recommends "${missing[@]}" >/dev/null
  fi
}

# uv, which also writes the locks. What ./train.sh needs it installs in 4 s, where pip took 35 s of computing.
install_uv() {
  if [[ $("$UV" --version 2>/dev/null) != "uv 0.13.9 "* ]]; then
    say "uv, in build/uv"
    rm -rf build/uv
    "$PYTHON" -m venv build/uv
    build/uv/bin/pip -qq install uv==0.13.9
  fi
}

# An nvcc: the one of CUDA_HOME, the system's, or pip's, in build/cuda. Sets CUDA_HOME in the last case.
install_cuda_compiler() {
  if [[ -n ${CUDA_HOME:-} || -x /usr/local/cuda/bin/nvcc ]] || command -v nvcc >/dev/null; then return; fi
  export CUDA_HOME=$PWD/build/cuda/nvidia/cu13
  if [[ ! -x $CUDA_HOME/bin/nvcc ]]; then
    say "CUDA's compiler, in build/cuda"
    rm -rf build/cuda
    "$UV" pip install -q --python "$PYTHON" --no-deps --target build/cuda nvidia-cuda-nvcc==13.0.88 \
      nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85
  fi
}

make_venv() { # folder, interpreter
  # Its full path: uv would look for a bare name in places of its own too.
  "$UV" venv -q --clear --python "$("$2" -c 'import sys; print(sys.executable)')" "$1"
}

# Sets LOCKED and BUILD_LOCKED: what keeps uv to the versions of bazel/locks/$1.txt and, in builds, build.txt.
use_lock() {
  LOCKED=(--constraints "bazel/locks/$1.txt") BUILD_LOCKED=(--build-constraints bazel/locks/build.txt)
  if [[ ! -f bazel/locks/$1.txt ]]; then
    say "There is no bazel/locks/$1.txt: what is installed are the newest releases, which nobody has tried"
    LOCKED=() BUILD_LOCKED=()
  fi
}

has_gpu() { [[ -e /proc/driver/nvidia/version ]]; }

install_in_place() {
  local extras=(--extra experiments) kernels="kernels for CPU and CUDA" version
  install_system_packages
  install_uv
  if has_gpu; then
    install_cuda_compiler
    extras+=(--extra cuda13)
  elif [[ -z ${CUDA_HOME:-} ]]; then
    export CUDA_HOME=none # there may be an nvcc, but nothing here could run what it would compile for a minute
    kernels="kernels for the CPU"
  fi
  version=$(version_of "$PYTHON")
  [[ -x build/venv/bin/python && $(version_of build/venv/bin/python) == "$version" ]] || make_venv build/venv "$PYTHON"
  use_lock "$version"
  say "Packages, in build/venv"
  "$UV" pip install --python build/venv "${LOCKED[@]}" -r pyproject.toml "${extras[@]}"
  say "bsjax in place, compiled by Bazel: $kernels"
  "$UV" pip install --python build/venv --no-deps "${BUILD_LOCKED[@]}" -e .
  build/venv/bin/python -m bsjax.info
}

# `source setup.sh` gives the functions alone.
if [[ ${BASH_SOURCE[0]} == "$0" ]]; then install_in_place; fi
