#!/bin/sh
echo ready > "$HOME/status"