#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# `repeat.sh SEED` trains SmolLM2-135M to count on, then tells its accuracy on held-out questions
# before and after, and their paired difference. Words like training.steps=8 override run.yaml.
# Stopped or killed, it goes on where it was when it is called again.
set -euo pipefail
cd "$(dirname "$0")"

seed="${1:?which seed? repeat.sh 0}"
shift
python="${PYTHON:-../../.venv/bin/python}"
model="${PENSTOCK_CACHE:-$HOME/.cache/penstock}/models/SmolLM2-135M-Instruct"
name="smollm2-counting-$seed"
export OMP_WAIT_POLICY=passive  # engine and trainer share the cores: who waits must not spin

penstock() { "$python" -m penstock.cli.main "$@"; }
evaluate() {
  penstock eval "outputs/$name" --suite held_out.jsonl --reward counting:is_right \
    --samples 2 "$@"
}

penstock run run.yaml --headless "name=$name" "seed=$seed" "models.policy.init=$model" "$@"
evaluate --version 0
evaluate
penstock compare "outputs/$name@0" "outputs/$name" --markdown "outputs/$name/comparison.md"
