#!/bin/sh
sed -i 's/return x$/return 2 * x/' calc.py