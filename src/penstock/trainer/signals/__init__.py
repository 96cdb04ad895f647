# SPDX-License-Identifier: Apache-2.0
"""Metrics of a step about its learning signal, and the alarms raised from them."""
