# SPDX-License-Identifier: Apache-2.0
"""The dataflow's decisions as pure state machines: no clock, no disk, no network."""
