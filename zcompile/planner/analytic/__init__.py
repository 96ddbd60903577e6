"""Computes scale on paper: what a transformer of any size needs and takes on a cluster, from its
shape.

Nothing is traced and nothing runs: formulas and memory by strategy (`model.py`), and a simulation
of one rank's step layer by layer (`step.py`). `paper.py` holds the figures that ZeRO-Infinity
printed, as data to be compared with. For `zinf plan config.json --fit`, `decoder.py` reads the
shape of a language model, and `fit.py` estimates zcompile's own step of it on one device.

Source of formulas and figures, where no other is named: ZeRO-Infinity, arXiv:2104.07857.
"""
