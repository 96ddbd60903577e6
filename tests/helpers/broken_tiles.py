"""Schedules whose tiles are wrong."""

BROKEN_TILES: dict[str, tuple[tuple[tuple[int, int], ...], str]] = {
    "beyond its gradient": (
        ((0, 64), (64, 128)),
        "bytes 64 to 192 of the gradient of 'w', which has 128, are no tile of it",
    ),
    "twice": (
        ((0, 64), (32, 64)),
        "bytes 32 to 96 of the gradient of 'w' leave before the contribution that they left in "
        "is whole",
    ),
    "never": (
        ((0, 64), (64, 64), (0, 64)),
        "64 bytes of the gradient of 'w' never leave",
    ),
}
"""Bytes that leave -> (the tiles: where each begins, its bytes), the sentence."""
