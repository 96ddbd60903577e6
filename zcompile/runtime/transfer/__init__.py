"""The transfer package moves bytes between tiers: tickets, the order of transfers, and their
staging memory."""
