# SPDX-License-Identifier: Apache-2.0
"""What gives processes to machines: run folders, plans of services, launchers. Starts commands,
not objects."""
