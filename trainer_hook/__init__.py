"""The trainer's side of fa_rollout, and the contract: record schema and control messages."""
