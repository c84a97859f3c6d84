"""Simulation of a run: the real flow control, modelled engines and trainer, a virtual clock."""

from fa_rollout.simulation.model import simulate
from fa_rollout.simulation.outcome import Outcome
from fa_rollout.simulation.scenario import Scenario, lengths_of_file, lognormal_lengths, recorded_lengths

__all__ = ["Outcome", "Scenario", "lengths_of_file", "lognormal_lengths", "recorded_lengths", "simulate"]
