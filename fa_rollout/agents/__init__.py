"""Agents in processes of their own: the user's function or program, one session for each rollout.

Invariant: whatever an agent does, its session ends once, by a result or by one failure that names the place
in the user's code; what it started ends with it, or at the latest with its worker process.
"""

from fa_rollout.agents.session import AgentSession

__all__ = ["AgentSession"]
