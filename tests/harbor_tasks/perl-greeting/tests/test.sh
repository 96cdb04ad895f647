#!/bin/sh
perl /tests/check.pl
