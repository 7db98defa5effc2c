#!/usr/bin/env bash
# What a release needs beyond scripts/test.sh, which it runs first: all parts under the
# sanitizers, 10,000 rounds of random collectives, 10,000 changed programs of torch.export,
# programs that use hasten in each way, a build with each release of LibTorch, the packages, each installed where nothing else is, a hundred training runs that are killed at
# random, models of each family that transformers and hasten exchange, published tokenizers,
# 9,700 changed keys of their files, a cache that huggingface_hub shares, each argument of three classes of Python, the documentation site, the
# page of a run in a browser, and the benchmarks with their thresholds. It takes hours. The packages need debootstrap and root. Ends with 0 if all is well.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# Random collectives, 10,000 rounds in each world and over each back end, and changed programs.
random_operations() {
  local bin=build/release/bin world where
  local -x OMP_NUM_THREADS=1 HASTEN_RANDOM_ROUNDS=10000 HASTEN_TEST_CASE_SECONDS=14400
  "$bin/hasten_unit_tests" --gtest_filter='TransferQueue.Random*:ExportedFuzz.*'
  for world in 2 3 4; do
    for where in HASTEN_COMM_BACKEND=shm HASTEN_COMM_BACKEND=gloo HASTEN_TEST_DEVICE=test_device; do
      say "--- random operations, $world ranks, $where"
      env "$where" "$bin/hasten_dist_tests" --world "$world" '--gtest_filter=RandomOperations.*'
    done
  done
}

cd "$root"
scripts/test.sh --whole
tools/check_headers.py --all
HASTEN_RANDOM_ROUNDS=300 scripts/sanitize.sh --all
random_operations
scripts/consumers.sh
scripts/test_versions.sh
scripts/package.sh
tools/kill_trials.py --trials 100 --programs build/release/bin
python3 -m venv build/golden
build/golden/bin/pip install -q torch==2.13.0 transformers==5.23.0 sentencepiece==0.2.3 peft==0.21.2 accelerate==1.15.0
build/golden/bin/python tools/check_families.py
build/golden/bin/python tools/check_families.py --full
build/golden/bin/python tools/check_generation.py
build/golden/bin/python tools/check_adapters.py
build/golden/bin/python tools/check_tokenizers.py
build/golden/bin/python tools/check_keys.py
build/golden/bin/python tools/check_hub.py
build/golden/bin/python tools/check_mapping.py --packages
OMP_NUM_THREADS=1 build/golden/bin/python tools/check_exported.py
scripts/site.sh
tools/check_report.py --programs build/release/bin
mapfile -t benchmarks < <(scripts/bench.sh --list | awk '{ print $1 }')
scripts/bench.sh "${benchmarks[@]}" --json build/bench.json
say "ready for a release; packages are in build/packages, benchmarks in build/bench.json, the site in build/site"
