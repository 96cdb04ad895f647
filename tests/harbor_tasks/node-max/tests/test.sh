#!/bin/sh
if command -v node > /dev/null; then node /tests/check.js; else grep -q Math.max max.js && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt; fi
