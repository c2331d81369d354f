#!/usr/bin/env bash
# Every check: the wheel by Bazel, hooks (format, lint, types), and the tests of what was installed from the wheel.
# Arguments go to pytest, e.g. `./test.sh -k spmm`. PYTHON names the interpreter (default: python3); the other
# interpreters that bsjax supports are tried with other releases of jax, as far as this machine has them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source ./setup.sh

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }

# Prints the path of an interpreter of version $1: on PATH if it runs, or one of pyenv's.
find_python() {
  local candidate
  for candidate in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python; do
    if [[ $(version_of "$candidate" 2>/dev/null) == "$1" ]]; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

# Builds the wheel for interpreter $1 in build/dist and installs it with its extras $3 in a fresh build/test-$2; further
# arguments are requirements that hold there.
install_wheel() {
  local python=$1 env=build/test-$2 extras=$3
  shift 3
  make_venv "$env" "$python"
  rm -rf build/dist
  "$env/bin/pip" -qq wheel --no-deps --wheel-dir build/dist .
  "$env/bin/pip" -qq install "$(ls "$PWD"/build/dist/*.whl)[$extras]" "$@"
  ls build/dist
}

# Runs pytest of environment $1 from a folder that holds the tests and no bsjax but the installed one can be imported.
run_tests() {
  local env=$PWD/build/test-$1
  shift
  rm -rf build/tested
  mkdir -p build/tested
  cp -r tests experiments README.md pyproject.toml build/tested
  (
    cd build/tested
    "$env/bin/python" -m bsjax.info
    "$env/bin/python" -c "import bsjax, sys; assert bsjax.__file__.startswith(sys.prefix), bsjax.__file__"
    "$env/bin/python" -m pytest -p no:cacheprovider "$@"
  )
}

# A few of everything: enough to see that another release of jax or Python loads, differentiates and transforms.
SMOKE=(-q -n 2 tests/test_info.py tests/test_nn.py tests/test_linen.py tests/test_transforms.py)

export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}
DEFAULT=$(version_of "$PYTHON")
install_system_packages
install_cuda_compiler

say "Wheel for Python $DEFAULT, tested with its newest jax"
install_wheel "$PYTHON" "$DEFAULT" test,dev

say "Hooks"
PATH=$PWD/build/test-$DEFAULT/bin:$PATH pre-commit run --all-files --show-diff-on-failure

say "Bazel's own tests"
bazel=$(build/test-$DEFAULT/bin/python bazel/backend.py)
PYTHON_BIN_PATH=$PWD/build/test-$DEFAULT/bin/python $bazel test //:tests //experiments

done_already=$(build/test-$DEFAULT/bin/python -c 'import jax; print(jax.__version__)')
for pair in 3.11:0.10.2 3.12:0.11.2 3.12: 3.13:; do
  version=${pair%%:*} jax=${pair##*:}
  if [[ $version == "$DEFAULT" && ${jax:-$done_already} == "$done_already" ]]; then continue; fi
  if ! python=$(find_python "$version"); then
    say "Python $version: no such interpreter here; its wheel is NOT built and NOT tested"
    continue
  fi
  say "Python $version with jax ${jax:-(the newest)}: smoke tests"
  install_wheel "$python" "$version" test ${jax:+"jax==$jax"}
  run_tests "$version" "${SMOKE[@]}"
done

$bazel shutdown # its server has no part in what follows, and half a gigabyte
say "Python $DEFAULT: all tests"
run_tests "$DEFAULT" -n 2 "$@"
