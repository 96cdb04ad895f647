#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Trains SmolLM2-135M on arithmetic, then tells its accuracy on held-out problems before and after,
# and draws the learning curve. Words like training.steps=20 override run.yaml.
# Stopped or killed, it goes on where it was when it is called again.
set -euo pipefail
cd "$(dirname "$0")"

python="${PYTHON:-../../.venv/bin/python}"
model="${PENSTOCK_CACHE:-$HOME/.cache/penstock}/models/SmolLM2-135M-Instruct"
run=outputs/smollm2-arithmetic
export OMP_WAIT_POLICY=passive  # engine and trainer share the cores: who waits must not spin

"$python" -m penstock.cli.main run run.yaml --headless "models.policy.init=$model" "$@"
last=$(printf '%s\n' "$run"/checkpoints/step_* | sort --version-sort | tail -n 1)
"$python" evaluate.py "$model" "$last"
PYTHONPATH=../.. "$python" curve.py "$run" "$run/curve.svg"
