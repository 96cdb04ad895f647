#!/bin/bash
reward=1
for number in 0 2 10; do bash check.sh $number || reward=0; done
for number in 1 7; do bash check.sh $number && reward=0; done
[[ -f check.sh ]] || reward=0
echo $reward > /logs/verifier/reward.txt
exit 3
