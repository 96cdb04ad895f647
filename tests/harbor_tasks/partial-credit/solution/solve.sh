#!/bin/sh
for n in one two three four; do echo $n > $n.txt; done