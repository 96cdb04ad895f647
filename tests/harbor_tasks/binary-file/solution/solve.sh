#!/bin/sh
stat -c %s image.bin > size.txt