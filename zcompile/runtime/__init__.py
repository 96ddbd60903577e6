"""The runtime carries out schedules: where bytes rest, how they travel, and the loop that walks a
schedule.

From the bottom: `io` (files and asynchronous disk access), `device` (where compute happens, and its
arena), `tiers` (where bytes rest), `transfer` (how they travel), `store` (which entry rests where),
`gradients`, and `durable` (commits). `executor` walks a schedule, `session` ties all of this to one
model, `eager` gives tiered tensors their meaning outside of compiled graphs. `profile`, `meter` and
`live_memory` measure.
"""
