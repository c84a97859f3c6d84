"""Simulation of a run: the real flow control, modelled engines and trainer, a virtual clock."""
