"""The version, said once: pyproject.toml and the dump read it from here."""

VERSION = "0.1.0"
