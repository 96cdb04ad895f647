#!/bin/sh
printf %s "$COLOUR" > colour.txt