"""Side-by-side measurements: ratios within one run, medians of interleaved rounds."""
