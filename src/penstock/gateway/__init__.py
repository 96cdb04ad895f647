# SPDX-License-Identifier: Apache-2.0
"""The single place where agents meet engines, and where experience is recorded token by token."""
