#!/bin/sh
found=0
for name in one two three four; do [ "$(cat $name.txt 2>/dev/null)" = $name ] && found=$((found + 1)); done
printf '{"reward": %s, "found": %s}' "$(awk "BEGIN { print $found / 4 }")" $found > /logs/verifier/reward.json
