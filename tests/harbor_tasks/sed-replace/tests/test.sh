#!/bin/sh
if [ "$(sed -n "/https:/p" page.html | wc -l)" = 2 ] && ! grep -q http: page.html; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
