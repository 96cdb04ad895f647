# SPDX-License-Identifier: Apache-2.0
"""How other services talk to the dataflow. Imports no storage."""
