#!/usr/bin/env bash
# Every check: the wheel by Bazel, hooks (format, lint, types), and the tests of what was installed from the wheel, with
# the packages of bazel/locks. PYTHON names the interpreter of all tests (default: python3); the other interpreters and
# releases of jax that bsjax supports run a part of them, as far as this machine has them.
#   ./test.sh [ARGUMENTS OF PYTEST]          e.g. `./test.sh -k spmm`
#   ./test.sh newest [ARGUMENTS OF PYTEST]   the same with the newest releases instead, and what broke
#   ./test.sh lock                           renews bazel/locks
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source ./setup.sh

# What is tried: the newest jax for each Python, which for 3.11 is 0.10.2, the oldest jax that is supported; and one
# between. Each name is that of a lock and of a folder build/test-NAME.
TRIED=(3.11 3.12 3.13 3.12-jax0.11.2)

# A few of everything: enough to see that another release of jax or Python loads, differentiates and transforms.
SMOKE=(-q tests/test_info.py tests/test_nn.py tests/test_linen.py tests/test_transforms.py)

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

write_locks() {
  local name
  local compile=("$UV" pip compile --quiet --upgrade --generate-hashes --no-annotate
    --custom-compile-command "./test.sh lock")
  for name in "${TRIED[@]}"; do
    say "bazel/locks/$name.txt"
    "${compile[@]}" --python-version "${name%-jax*}" --all-extras pyproject.toml -o "bazel/locks/$name.txt" \
      --constraints <([[ $name != *-jax* ]] || echo "jax==${name#*-jax}") >/dev/null
  done
  # pip and uv build in an environment of the build requirements and all that those require, though headers alone are used.
  say "bazel/locks/build.txt"
  "$PYTHON" -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")' |
    "${compile[@]}" --python-version 3.11 --universal - -o bazel/locks/build.txt >/dev/null
}

# Builds the wheel for interpreter $2 in build/dist and installs it with its extras $3 in a fresh build/test-$1.
install_wheel() {
  local env=build/test-$1
  if ((newest)); then LOCKED=(--refresh) BUILD_LOCKED=(); else use_lock "$1"; fi
  make_venv "$env" "$2"
  rm -rf build/dist
  "$UV" build -q --wheel --python "$env/bin/python" "${BUILD_LOCKED[@]}" --out-dir build/dist .
  ls build/dist/*.whl
  "$UV" pip install -q --python "$env" "${LOCKED[@]}" "bsjax[$3] @ file://$(ls "$PWD"/build/dist/*.whl)"
  "$UV" pip freeze -q --python "$env" >"build/results/$1.txt"
}

# Runs pytest of environment $1 from a folder that holds the tests and no bsjax but the installed one can be imported.
run_tests() {
  local env=$PWD/build/test-$1 results=$PWD/build/results/$1.xml
  shift
  rm -rf build/tested
  mkdir -p build/tested
  cp -r tests experiments README.md pyproject.toml build/tested
  cd build/tested
  "$env/bin/python" -m bsjax.info
  "$env/bin/python" -c "import bsjax, sys; assert bsjax.__file__.startswith(sys.prefix), bsjax.__file__"
  "$env/bin/python" -m pytest -p no:cacheprovider -n 2 --dist worksteal --junitxml "$results" "$@"
}

smoke_tests() { # name, interpreter
  install_wheel "$1" "$2" test
  run_tests "$1" "${SMOKE[@]}"
}

hooks() { PATH=$PWD/build/test-$DEFAULT/bin:$PATH pre-commit run --all-files --show-diff-on-failure; }

bazel_tests() {
  local bazel
  bazel=$("$PYTHON" bazel/backend.py)
  PYTHON_BIN_PATH=$PWD/build/test-$DEFAULT/bin/python $bazel test //:tests //experiments
}

# Runs stage $1, which is the rest of the line. What fails is told at the end, and the next stage runs all the same.
stage() {
  say "$1"
  # In a condition the shell would go on after an error inside.
  set +e
  (
    set -e
    "${@:2}"
  )
  local status=$?
  set -e
  ((status == 0)) || broken+=(--broken "$1")
}

DEFAULT=$(version_of "$PYTHON")
newest=0 broken=() # of arguments of tally.py
install_system_packages
install_uv
case ${1:-} in
lock)
  write_locks
  exit
  ;;
newest)
  newest=1
  shift
  ;;
esac

export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}
install_cuda_compiler
rm -rf build/results
mkdir -p build/results

stage "Wheel for Python $DEFAULT" install_wheel "$DEFAULT" "$PYTHON" test,dev
stage "Hooks" hooks
stage "Bazel's own tests" bazel_tests
for name in "${TRIED[@]}"; do
  if [[ $name == "$DEFAULT" ]] || { ((newest)) && [[ $name == *-jax* ]]; }; then continue; fi
  if python=$(find_python "${name%-jax*}"); then
    stage "Smoke tests with Python ${name/-/ and }" smoke_tests "$name" "$python"
  else
    say "Python ${name%-jax*}: no such interpreter here; its wheel is NOT built and NOT tested"
  fi
done
$("$PYTHON" bazel/backend.py) shutdown # its server has no part in what follows, and half a gigabyte
stage "All tests with Python $DEFAULT" run_tests "$DEFAULT" "$@"

say "Result"
((newest)) || broken+=(--locked)
"$PYTHON" tests/tally.py "${broken[@]}"
