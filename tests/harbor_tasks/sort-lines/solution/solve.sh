#!/bin/sh
LC_ALL=C sort words.txt > sorted.txt