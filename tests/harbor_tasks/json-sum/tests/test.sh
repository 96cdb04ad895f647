#!/bin/sh
python3 /tests/check
