#!/bin/sh
mkdir -p a/b/c && : > a/b/c/done