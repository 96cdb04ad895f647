# SPDX-License-Identifier: Apache-2.0
"""The decisions of the dataflow as pure state machines: no clock, no disk, no network."""
