"""The runtime: where bytes rest, how they travel, and the loop that walks a schedule.

From the bottom: `pages`, `pace`, `workers` (memory, throttle, threads); `device*` (where compute
happens); `tiers`, `tier_*` (where bytes rest); `staging`, `transfers` (how they travel); `arena`,
`meter`; and `store`, which owns all of these and is what the rest of the house talks to.
"""
