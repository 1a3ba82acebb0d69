#!/usr/bin/env bash
# Tests with other versions of TRL, each in a small environment on top of .venv. `make test-trl` takes the oldest and the
# newest supported version, unless `make test` has it, and a part of the tests; `make test-trl TRL=1.15.0` takes one
# version and all tests of trainer, parity and command line, or those in TESTS. Only TRL, what its requirements need in
# another version, and further requirements are installed: `make test-trl TRL=1.16.0 WITH="transformers==5.6.2"`.
set -euo pipefail
cd "$(dirname "$0")/../.."
base=$1
folder=$2
version=$3
others=("${@:4}")

packages_of() {
  "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

# The environment of a version, `$python`.
install() {
  local venv=$folder/$(IFS=-; echo "$1${others[*]:+-${others[*]}}")
  python=$venv/bin/python
  [ "$venv/.installed" -nt "$base/.installed" ] && return
  rm -rf "$venv"
  "$base/bin/python" -m venv --without-pip "$venv"
  # The packages of the other environment, pip included, come after its own.
  echo "import site; site.addsitedir('$(packages_of "$base")')" >"$(packages_of "$venv")/base.pth"
  grep -v '^trl==' constraints.txt >"$venv/constraints.txt"
  "$python" -m pip install -q -c "$venv/constraints.txt" "trl==$1"
  [ "${#others[@]}" = 0 ] || "$python" -m pip install -q "${others[@]}"
  # Before 1.16, TRL computes GRPO's loss with Triton only. Without a GPU it runs in Triton's interpreter.
  "$python" -c 'import trl.kernels' 2>/dev/null ||
    "$python" -m pip install -q --no-deps -c tests/distributed/constraints.txt triton
  touch "$venv/.installed"
}

run_tests() {
  local interpret=
  "$python" -c 'import triton' 2>/dev/null && interpret=1
  echo "Tests with TRL $("$python" -c 'from importlib.metadata import version; print(version("trl"))')"
  OMP_NUM_THREADS=1 ${interpret:+env TRITON_INTERPRET=1} "$python" -m pytest -q "$@"
}

if [ -n "$version" ]; then
  install "$version"
  # shellcheck disable=SC2086
  run_tests ${TESTS:-tests/test_trl_compat.py tests/test_trainer.py tests/test_trainer_parity.py tests/test_config.py
    tests/training tests/cli tests/rollout tests/evaluation tests/contexts/test_turns.py}
  exit
fi
versions=$("$base/bin/python" tests/training/trl_versions.py)
for version in $versions; do
  install "$version"
  run_tests -n 2 tests/test_trl_compat.py tests/test_trainer.py tests/test_trainer_parity.py tests/rollout/test_vllm.py \
    tests/training/test_checkpoints.py
done
