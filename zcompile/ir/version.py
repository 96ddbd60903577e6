"""Holds the version of zcompile, which packaging reads without importing anything."""

VERSION = "0.1.0"
