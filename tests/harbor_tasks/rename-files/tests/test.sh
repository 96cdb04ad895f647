#!/bin/bash
shopt -s nullglob
left=(notes/*.txt) made=(notes/*.md)
[[ ${#left[@]} -eq 0 && ${#made[@]} -eq 2 && "$(cat notes/b.md)" == second ]] && reward=1 || reward=0
echo $reward > /logs/verifier/reward.txt
