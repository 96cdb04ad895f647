#!/bin/sh
awk -F, 'FNR == NR { if (FNR > 1) want[++n] = $2; next } { if ($0 != want[++m]) bad = 1 }
    END { print (n == m && !bad) ? 1 : 0 }' /tests/table.csv second.txt > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
