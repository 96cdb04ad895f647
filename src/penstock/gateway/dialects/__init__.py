# SPDX-License-Identifier: Apache-2.0
"""Request and answer shapes of the APIs agents already speak, one module per API."""
