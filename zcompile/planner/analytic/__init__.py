"""Scale on paper: what a transformer of any size needs and takes on a cluster, from its shape.

Nothing is traced and nothing runs: formulas (`shapes.py`, `bandwidth.py`), memory by strategy
(`strategies.py`), and a simulation of one rank's step layer by layer (`events.py`, `step.py`).
`article.py` holds the figures that ZeRO-Infinity printed, as data to be compared with.

Source of formulas and figures, where no other is named: ZeRO-Infinity, arXiv:2104.07857.
"""
