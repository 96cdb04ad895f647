#!/bin/sh
tr a-z A-Z < /data/input.txt > /data/output.txt