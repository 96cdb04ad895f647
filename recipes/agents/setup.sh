#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A virtual environment for each agent, made once under ${PENSTOCK_CACHE:-~/.cache/penstock}/agents.
# Prints that folder. Node's agent needs none, only node 18 or newer.
set -euo pipefail

agents="${PENSTOCK_CACHE:-$HOME/.cache/penstock}/agents"
for package in openai anthropic openai-agents; do
  environment="$agents/$package"
  if [[ ! -e "$environment/.made" ]]; then
    rm -rf "$environment"
    "${PYTHON:-python3}" -m venv "$environment" >&2
    "$environment/bin/pip" install --quiet --disable-pip-version-check "$package" >&2
    touch "$environment/.made"
  fi
done
echo "$agents"
