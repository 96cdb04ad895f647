# SPDX-License-Identifier: Apache-2.0
"""Tools of a workflow: MCP servers and built-in tools, under a lease, with every call bounded."""
