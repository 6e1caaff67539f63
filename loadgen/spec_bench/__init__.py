"""Speculation measured: tokens per second with it and without, in pairs of one run (`python -m loadgen spec`)."""
