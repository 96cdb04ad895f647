#!/bin/sh
pwd > where.txt