#!/bin/sh
if [ "$(cat colour.txt)" = "deep blue" ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
