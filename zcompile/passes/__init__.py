"""The passes: one decision each, one file each. The order stands in `pipeline.py`."""
