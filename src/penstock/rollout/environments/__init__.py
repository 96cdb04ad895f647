# SPDX-License-Identifier: Apache-2.0
"""Environments of an attempt: processes outside of penstock that a workflow plays against.

`protocol` says what a bridge and a node tell each other, `bridge_process` owns the process,
`session` is `ctx.env`, `environments` starts the bridges of one node. The scripts in `bridges/` run
in separate virtual environments and import nothing of penstock."""
