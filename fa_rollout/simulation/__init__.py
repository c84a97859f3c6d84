"""Simulation of a run: the real flow control, modelled engines and trainer, a virtual clock."""

from fa_rollout.simulation.model import Outcome, Scenario, simulate

__all__ = ["Outcome", "Scenario", "simulate"]
