#!/bin/sh
if [ "$(cat size.txt)" = 256 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
