#!/usr/bin/env bash
# Tests of trainer, parity and command line with another version of TRL, in a small environment on top of .venv
# (`make test-trl TRL=1.15.0`). Only TRL, and what its requirements need in another version, is installed in it, and
# further requirements: `make test-trl TRL=1.16.0 WITH="transformers==5.6.2 accelerate==1.10.1"`.
set -euo pipefail
cd "$(dirname "$0")/../.."
base=$1
version=$3
others=("${@:4}")
venv=$2/$(IFS=-; echo "$version${others[*]:+-${others[*]}}")
python=$venv/bin/python

packages_of() {
  "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

if ! [ "$venv/.installed" -nt "$base/.installed" ]; then
  rm -rf "$venv"
  "$base/bin/python" -m venv --without-pip "$venv"
  # The packages of the other environment, pip included, come after its own.
  echo "import site; site.addsitedir('$(packages_of "$base")')" >"$(packages_of "$venv")/base.pth"
  grep -v '^trl==' constraints.txt >"$venv/constraints.txt"
  "$python" -m pip install -q -c "$venv/constraints.txt" "trl==$version"
  [ "${#others[@]}" = 0 ] || "$python" -m pip install -q "${others[@]}"
  # Before 1.16, TRL computes GRPO's loss with Triton only. Without a GPU it runs in Triton's interpreter.
  "$python" -c 'import trl.kernels' 2>/dev/null ||
    "$python" -m pip install -q --no-deps -c tests/distributed/constraints.txt triton
  touch "$venv/.installed"
fi

export OMP_NUM_THREADS=1
"$python" -c 'import triton' 2>/dev/null && export TRITON_INTERPRET=1
"$python" -m pytest tests/test_trainer.py tests/test_trainer_parity.py tests/test_config.py \
  tests/training tests/cli tests/rollout tests/evaluation tests/contexts/test_turns.py
