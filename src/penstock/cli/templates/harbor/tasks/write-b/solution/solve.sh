#!/bin/sh
printf "%s%s%s" $LETTER $LETTER $LETTER > answer.txt
