#!/bin/sh
if [ -f a/b/c/done ] && [ ! -s a/b/c/done ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
