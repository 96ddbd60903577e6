"""The tiers package keeps the bytes of entries: on the device, on the host, and on disks."""
