#!/bin/sh
awk -F, 'NR > 1 { print $2 }' table.csv > second.txt