#!/usr/bin/env bash
# Run lab_tests/fake_cuda.py with torch's CUDA build, in a virtual environment of its own.
set -euo pipefail
cd "$(dirname "$0")/.."
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
"$environment/bin/pip" install -q "torch==2.11.0" "transformers==5.17.0" psutil click rich
CUDA_VISIBLE_DEVICES="" "$environment/bin/python" -m lab_tests.fake_cuda
