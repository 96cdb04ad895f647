#!/bin/sh
wc -w < text.txt | tr -d ' ' > count.txt