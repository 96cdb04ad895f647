# SPDX-License-Identifier: Apache-2.0
"""Request and response formats of the APIs that agents use, one module per API."""
