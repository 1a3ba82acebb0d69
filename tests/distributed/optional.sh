#!/usr/bin/env bash
# Tests of DeepSpeed and bitsandbytes, in a small environment on top of .venv (`make test-slow`). They are not
# installed in .venv, because every process of the other tests would import DeepSpeed.
# Packages that cannot be installed are reported and their tests skip.
set -euo pipefail
cd "$(dirname "$0")/../.."
base=$1
venv=$2
here=tests/distributed
python=$venv/bin/python

made_from_these_files() {
  [ "$venv/.installed" -nt $here/constraints.txt ] && [ "$venv/.installed" -nt "$base/.installed" ]
}

packages_of() {
  "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

# Requirements of an extra of pyproject.toml.
extra() {
  "$python" -c 'import sys, tomllib
with open("pyproject.toml", "rb") as file:
    print(*tomllib.load(file)["project"]["optional-dependencies"][sys.argv[1]])' "$1"
}

install() {
  "$python" -m pip install -q -c constraints.txt -c $here/constraints.txt "$@"
}

loads() {
  "$python" -c "import $1" >/dev/null
}

if ! made_from_these_files; then
  rm -rf "$venv"
  "$base/bin/python" -m venv --without-pip "$venv"
  # The packages of the other environment, pip included, come after its own.
  echo "import site; site.addsitedir('$(packages_of "$base")')" >"$(packages_of "$venv")/base.pth"
  missing=
  # DeepSpeed's build needs torch and compiles nothing.
  { install setuptools wheel && DS_BUILD_OPS=0 install --no-build-isolation $(extra deepspeed) && loads deepspeed; } ||
    missing="DeepSpeed"
  { install $(extra quantization) && loads bitsandbytes; } || missing="$missing bitsandbytes"
  # Missing packages are tried again in the next run.
  [ -z "$missing" ] && touch "$venv/.installed"
  for name in $missing; do
    echo "SKIPPED: $name could not be installed, or does not load (see above): its tests skip" >&2
  done
fi

OMP_NUM_THREADS=1 "$python" -m pytest -m "slow or not slow" $here tests/loss/test_support_matrix.py \
  tests/teacher/test_external.py \
  -k "zero or deepspeed or four_bits"
