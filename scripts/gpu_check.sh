#!/usr/bin/env bash
# Shows whether hasten works on the GPU of this machine. Each step is useful alone, takes less than
# 9 minutes, prints a row of a table, and leaves STEP.log and STEP.json in a folder.
#
#   scripts/gpu_check.sh [flags] [STEP…]    without a step: all of them, in this order
#
#   build      builds hasten and its tests with the LibTorch of python3, or of HASTEN_TORCH, into
#              build/gpu. It needs no network where scripts/carry_dependencies.sh has filled .deps.
#              A build that took too long continues in the next call.
#   probe      what GPU, driver, CUDA and NCCL there are; streams, memory, each collective and abort
#              in a world of one over NCCL
#   unit       the unit tests that run on devices, and those of one rank; of two, with two GPUs
#   train      the losses of 20 fp32 steps are those of the CPU, within 1e-4; also on two ranks, with
#              two GPUs
#   resume     a run that was interrupted ends with the bits of one that was not
#   sanitizer  compute-sanitizer finds no wrong access to memory in two steps
#   bench      scripts/bench.sh gpu: the Trainer's steps compared with Hugging Face's and a plain
#              loop's; python3 needs transformers and accelerate
#
#   --device test     the steps but NCCL on the device of hasten's tests, without a GPU and in
#                     small: a sixteenth of the unit tests, no peer. The tests of ctest run all.
#   --out FOLDER      default: $OUT, or build/gpu_check
#   --programs FOLDER use these programs; build is then no step
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

all_steps=(build probe unit train resume sanitizer bench)
step_seconds=530
device=cuda out=${OUT:-$root/build/gpu_check} programs='' steps=()
while (($#)); do
  case $1 in
    --device) [[ ${2:-} =~ ^(cuda|test)$ ]] || die "--device takes cuda or test" && device=$2 && shift ;;
    --out) out=${2:?--out needs a folder} && shift ;;
    --programs) programs=$(realpath "${2:?--programs needs a folder}") && shift ;;
    -h | --help) sed -n '2,28s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit ;;
    *)
      [[ " ${all_steps[*]} " == *" $1 "* ]] || die "unknown step $1. Steps: ${all_steps[*]}"
      steps+=("$1")
      ;;
  esac
  shift
done
((${#steps[@]})) || steps=("${all_steps[@]}")
if [[ -n $programs ]]; then
  mapfile -t steps < <(printf '%s\n' "${steps[@]}" | grep -vx build)
fi
tree=$root/build/gpu
programs=${programs:-$tree/bin}
work=$out/work
mkdir -p "$work" || die "cannot make $out"

# What a program needs to find the device, and the name of the device. The programs
# themselves are the same.
with_device=(env) name=$device model=bert-mini
if [[ $device == test ]]; then
  name=test_device model=bert-tiny
  # Autograd's threads are as many as those of a forward, so that sums are the same.
  with_device+=("LD_PRELOAD=$programs/test_device.so" OMP_NUM_THREADS=1)
else
  # Products in fp32 are fp32.
  with_device+=(NVIDIA_TF32_OVERRIDE=0)
fi

# NCCL refuses two ranks on one GPU.
worlds=(1 2)
if [[ $device == cuda ]] && (($({ nvidia-smi -L 2>/dev/null || true; } | wc -l) < 2)); then
  worlds=(1)
fi

# Each step below writes its log on stdout and stderr, and its remark on descriptor 3.
remark() { printf '%s' "$*" >&3; }
fail() {
  remark "$*"
  echo "failed: $*"
  exit 1
}

build() {
  local torch=${HASTEN_TORCH:-} targets=(hasten hasten-worker hasten_benchmarks gpu_probe
    hasten_unit_tests hasten_dist_tests hasten_preloaded_device)
  [[ -n $torch ]] || torch=$(python3 -c 'import torch; print(torch.__path__[0])') ||
    fail "python3 has no torch, and HASTEN_TORCH is not set"
  cmake -S "$root" -B "$tree" -G Ninja -DCMAKE_BUILD_TYPE=Release "-DHASTEN_TORCH=$torch" \
    -DHASTEN_CUDA="$([[ $device == cuda ]] && echo ON || echo AUTO)" -DHASTEN_EXAMPLES=OFF \
    -DHASTEN_INSTALL=OFF || fail "cmake could not configure"
  timeout "$step_seconds" cmake --build "$tree" -j "$(compile_jobs)" --target "${targets[@]}" || {
    (($? == 124)) && fail "not complete in $step_seconds s: run it again"
    fail "it does not compile"
  }
  remark "LibTorch in $torch"
}

probe() {
  local found="the test device"
  if [[ $device == cuda ]]; then
    nvidia-smi || fail "nvidia-smi finds no GPU and driver"
    found=$(nvidia-smi --query-gpu=name,driver_version,memory.total,compute_cap \
      --format=csv,noheader | paste -sd ';')
    python3 -c 'import torch; print("torch", torch.__version__, "CUDA", torch.version.cuda,
      "NCCL", torch.cuda.nccl.version())'
  fi
  [[ -x $programs/gpu_probe ]] || fail "$found; for the rest the step build comes first"
  "${with_device[@]}" NCCL_DEBUG=INFO timeout 120 "$programs/gpu_probe" --device "$name" ||
    fail "$found; see FAILED in the log"
  remark "$found"
}

unit() {
  local cases failed='' world
  mapfile -t cases <"$(dirname "$programs")/device_cases" || fail "no device_cases beside $programs"
  export HASTEN_TEST_DEVICE=$name
  [[ $device == cuda ]] || export GTEST_TOTAL_SHARDS=16 GTEST_SHARD_INDEX=3
  timeout 240 "$programs/hasten_unit_tests" "--gtest_filter=${cases[0]}" || failed+=" unit"
  for world in "${worlds[@]}"; do
    timeout 140 "$programs/hasten_dist_tests" --world "$world" "--gtest_filter=${cases[1]}" ||
      failed+=" world_$world"
  done
  [[ -z $failed ]] || fail "failed:$failed; $(grep -c '^\[  FAILED  \].*)$' "$log") cases"
  remark "$(grep -c '^\[       OK \]' "$log") cases, worlds of ${worlds[*]}"
}

# hasten_train DEVICE FOLDER flag…: on generated texts.
hasten_train() {
  local run=("$programs/hasten" train --eval-split 0 --disable-tqdm --cache-dir "$work/cache"
    --device "$1" --output-dir "$2" "${@:3}")
  [[ $1 == cpu ]] || run=("${with_device[@]}" "${run[@]}")
  echo "$ ${run[*]}"
  timeout "${step_limit:-120}" "${run[@]}"
}

# train_20 DEVICE FOLDER flag…: 20 steps.
train_20() {
  hasten_train "$@" --model "$work/model" --max-steps 20 --batch-size 8 --learning-rate 1e-3 \
    --precision fp32 --full-determinism --logging-steps 1
}

# A model without dropout, because devices draw other numbers.
make_model() {
  [[ -f $work/model/config.json ]] && return
  rm -rf "$work/model" "$work/first"
  hasten_train cpu "$work/first" --model "$model" --max-steps 1 --save-strategy no || return
  sed -i -E 's/("[a-z_]*dropout[a-z_]*": )[0-9.e-]+/\10.0/' "$work/first/config.json"
  mv "$work/first" "$work/model"
}

# difference FOLDER FOLDER: prints the largest of two runs' losses, and fails above 1e-4.
difference() {
  python3 - "$1/metrics.jsonl" "$2/metrics.jsonl" <<'PYTHON'
import json
import sys

losses = [[r["loss"] for r in map(json.loads, open(file)) if r["type"] == "train"] for file in sys.argv[1:]]
assert [len(each) for each in losses] == [20, 20], losses
largest = max(abs(a - b) for a, b in zip(*losses))
print(f"{largest:.2g}")
sys.exit(0 if largest <= 1e-4 else 1)  # NaN is not
PYTHON
}

train() {
  local from ranks found text=''
  make_model || fail "hasten could not make a model"
  for ranks in "${worlds[@]}"; do
    rm -rf "$work"/train-*
    for from in cpu "$name"; do
      train_20 "$from" "$work/train-$from" --save-strategy no --nproc "$ranks" ||
        fail "training on $from with $ranks ranks failed"
    done
    found=$(difference "$work/train-cpu" "$work/train-$name") ||
      fail "world of $ranks: losses differ from the CPU's by ${found:-an unknown number}"
    text+="${text:+, }world of $ranks $found"
  done
  remark "largest difference of 20 losses: $text"
}

# same_files A B: the models of two runs are equal bit for bit.
same_files() { cmp "$1/model.safetensors" "$2/model.safetensors"; }

resume() {
  local folder
  make_model || fail "hasten could not make a model"
  rm -rf "$work"/{whole,again,parts}
  for folder in whole again; do
    train_20 "$name" "$work/$folder" --save-strategy steps --save-steps 10 || fail "training failed"
  done
  same_files "$work/whole" "$work/again" || fail "two runs differ that nothing interrupted"
  # What a run leaves that was killed after step 10.
  mkdir "$work/parts"
  cp -r "$work/whole/checkpoint-10" "$work/parts/"
  train_20 "$name" "$work/parts" --save-strategy steps --save-steps 10 \
    --resume-from-checkpoint "$work/parts/checkpoint-10" || fail "it does not resume"
  same_files "$work/whole" "$work/parts" || fail "the resumed run ends with other bits"
  remark "equal bit for bit after 10 of 20 steps"
}

sanitizer() {
  local under=()
  if [[ $device == cuda ]]; then
    command -v compute-sanitizer || fail "compute-sanitizer is not on the PATH"
    under=(compute-sanitizer --tool memcheck --target-processes all --error-exitcode 9)
  fi
  rm -rf "$work/two"
  # The test device itself ends a process with an error between streams or a host's access.
  step_limit=$step_seconds with_device+=("${under[@]}")
  hasten_train "$name" "$work/two" --model bert-tiny --max-steps 2 --batch-size 4 --max-length 32 \
    --save-strategy no || fail "two steps ended with $?"
  remark "two steps"
}

bench() {
  local more=(--rounds 3)
  [[ $device == cuda ]] || more=(--smoke)
  timeout "$step_seconds" python3 "$root/benchmarks/bench.py" gpu --device "$name" \
    --programs "$programs" --peer-python "${HASTEN_PEER_PYTHON:-python3}" --work "$work/bench" \
    --json "$out/bench_rows.json" "${more[@]}" || fail "a limit was missed, or a side failed"
  remark "rows in bench_rows.json"
}

# run_step NAME: prints its row.
run_step() {
  local step=$1 start=$SECONDS outcome=passed text
  log=$out/$step.log
  if ! ("$step") >"$log" 2>&1 3>"$work/remark"; then
    outcome=FAILED failed=1
    tail -n 30 "$log" >&2
  fi
  text=$(tr '|\n"\\' '/   ' <"$work/remark")
  printf '{"step": "%s", "device": "%s", "outcome": "%s", "seconds": %d, "remark": "%s"}\n' \
    "$step" "$name" "$outcome" $((SECONDS - start)) "$text" >"$out/$step.json"
  printf '| %s | %s | %d s | %s |\n' "$step" "$outcome" $((SECONDS - start)) "$text"
}

failed=0
printf '| step | on %s | time | |\n|---|---|---|---|\n' "$name"
for step in "${steps[@]}"; do
  run_step "$step"
done
exit $failed
