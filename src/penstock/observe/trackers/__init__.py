# SPDX-License-Identifier: Apache-2.0
"""Built-in trackers, one module each: `TRACKER` takes a `TrackedRun` (penstock.observe.tracking).

None is imported before it is chosen, and none needs an account to run offline."""
