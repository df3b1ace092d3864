#!/bin/bash
# Everything that needs a GPU, in one run of under 8 minutes: tests (kernels, dense drafts, collectives of
# shared sequences in an NCCL world of one), step time, and memory at 131,072 tokens.
#
#   bash benchmarks/gpu_check.sh OUT_DIR
#   bash benchmarks/gpu_check.sh OUT_DIR cpu     tries the same scripts on a CPU; measures nothing
#
# Needs a Python with torch (CUDA), safetensors, transformers and pytest; PYTHON names it.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: benchmarks/gpu_check.sh OUT_DIR [cpu]}
python=${PYTHON:-python3}
mkdir -p "$out"
export PYTHONPATH=. PYTHONUNBUFFERED=1
status=0

if [ "${2:-cuda}" = cpu ]; then
	echo "no GPU: dry run on the CPU" | tee "$out/device.txt"
	timeout 120 "$python" -m pytest -q tests/test_gpu_ranks.py tests/test_gpu_lm.py 2>&1 | tee "$out/tests.log" || status=1
	timeout 60 "$python" benchmarks/bench_gpu.py --memory-only --device cpu --size prototype \
		--tokens 2048 --density 0.01 2>&1 | tee "$out/memory.log" || status=1
	exit $status
fi

"$python" -c "import torch; assert torch.cuda.is_available(), 'no CUDA device'; \
print(torch.__version__, torch.cuda.get_device_name())" | tee "$out/device.txt" || exit 2

timeout 120 "$python" -m pytest -q -m gpu tests 2>&1 | tee "$out/tests.log" || status=1
timeout 80 "$python" benchmarks/bench_gpu.py --memory-only --tokens 131072 --density 0.01 0.08 \
	--out "$out/memory.jsonl" 2>&1 | tee "$out/memory.log" || status=1
timeout 150 "$python" benchmarks/bench_gpu.py --tokens 8192 --out "$out/step.jsonl" 2>&1 \
	| tee "$out/step.log" || status=1
timeout 120 "$python" benchmarks/bench_gpu.py --tokens 16384 --rounds 3 --out "$out/step.jsonl" 2>&1 \
	| tee -a "$out/step.log" || status=1
exit $status
