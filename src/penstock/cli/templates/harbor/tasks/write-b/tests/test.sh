#!/bin/sh
# The share of the first three characters of answer.txt that are the letter.
cat answer.txt 2> /dev/null | awk -v letter="$LETTER" '
    NR == 1 { for (i = 1; i <= 3; i++) right += substr($0, i, 1) == letter }
    END { print right / 3 }' > /logs/verifier/reward.txt
