#!/bin/bash
set -u
expected=$(awk '{ n += NF } END { print n }' /tests/text.txt)
if [[ "$(tr -d '[:space:]' < count.txt)" == "$expected" ]]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
