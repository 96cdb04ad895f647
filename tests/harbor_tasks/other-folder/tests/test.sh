#!/bin/sh
if [ "$(cat /data/output.txt)" = "ONE LINE" ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
