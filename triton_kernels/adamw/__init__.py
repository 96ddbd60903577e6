"""AdamW over the rows of a step, in one launch."""
