#!/bin/sh
cd notes && for f in *.txt; do mv "$f" "${f%.txt}.md"; done