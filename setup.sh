#!/usr/bin/env bash
# Sets up work on this tree: what Debian must bring, CUDA's compiler where a card is but no nvcc, and build/venv with
# bsjax installed in place. Done already, it does nothing twice. PYTHON names the interpreter (default: python3).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

PYTHON=${PYTHON:-python3}

say() { printf '\n== %s\n' "$*"; }

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

# An nvcc: the one of CUDA_HOME, the system's, or pip's, in build/cuda. Sets CUDA_HOME in the last case.
install_cuda_compiler() {
  if [[ -n ${CUDA_HOME:-} || -x /usr/local/cuda/bin/nvcc ]] || command -v nvcc >/dev/null; then return; fi
  export CUDA_HOME=$PWD/build/cuda/nvidia/cu13
  if [[ ! -x $CUDA_HOME/bin/nvcc ]]; then
    say "CUDA's compiler, in build/cuda"
    rm -rf build/cuda
    make_venv build/cuda-pip "$PYTHON"
    build/cuda-pip/bin/pip -qq install --no-deps --target build/cuda nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 \
      nvidia-cuda-crt==13.0.88 nvidia-cuda-runtime==13.0.96 nvidia-cuda-cccl==13.0.85
    rm -rf build/cuda-pip
  fi
}

make_venv() { # folder, interpreter
  rm -rf "$1"
  "$2" -m venv "$1"
}

has_gpu() { [[ -e /proc/driver/nvidia/version ]]; }

install_in_place() {
  local extras=experiments
  install_system_packages
  if has_gpu; then
    install_cuda_compiler
    extras+=,cuda13
  fi
  [[ -x build/venv/bin/pip ]] || make_venv build/venv "$PYTHON"
  say "bsjax in place, in build/venv (extras: $extras)"
  build/venv/bin/pip -qq install -e ".[$extras]"
  build/venv/bin/python -m bsjax.info
}

# `source setup.sh` gives the functions alone.
if [[ ${BASH_SOURCE[0]} == "$0" ]]; then install_in_place; fi
