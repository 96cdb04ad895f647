# SPDX-License-Identifier: Apache-2.0
"""What a step tells of itself, and the alarms raised from it."""
