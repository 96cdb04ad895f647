#!/bin/sh
if [ "$(cat where.txt)" = /srv/project/src ] && [ "$(pwd)" = /srv/project/src ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
