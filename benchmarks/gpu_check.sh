#!/bin/bash
# Everything that needs a GPU, in one run of under 8 minutes: tests, then step time and memory.
#
#   bash benchmarks/gpu_check.sh OUT_DIR
#
# Needs a Python with torch (CUDA), safetensors, transformers and pytest; PYTHON names it.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: benchmarks/gpu_check.sh OUT_DIR}
python=${PYTHON:-python3}
mkdir -p "$out"
export PYTHONPATH=. PYTHONUNBUFFERED=1

"$python" -c "import torch; assert torch.cuda.is_available(), 'no CUDA device'; \
print(torch.__version__, torch.cuda.get_device_name())" | tee "$out/device.txt" || exit 2

status=0
timeout 120 "$python" -m pytest -q -m gpu tests 2>&1 | tee "$out/tests.log" || status=1
timeout 200 "$python" benchmarks/bench_gpu.py --tokens 8192 --out "$out/step.jsonl" 2>&1 \
	| tee "$out/step.log" || status=1
timeout 150 "$python" benchmarks/bench_gpu.py --tokens 16384 --rounds 3 --out "$out/step.jsonl" 2>&1 \
	| tee -a "$out/step.log" || status=1
exit $status
