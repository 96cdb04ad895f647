# SPDX-License-Identifier: Apache-2.0
"""The way out of a sandbox: an HTTP proxy that reaches granted hosts only, and never inside."""
