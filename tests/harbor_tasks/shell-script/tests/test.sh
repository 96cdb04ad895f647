#!/bin/sh
if [ "$(./add.sh 20 22 2>/dev/null)" = 42 ] && [ "$(./add.sh 1 -1)" = 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
