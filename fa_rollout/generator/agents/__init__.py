"""The gateway: any agent on an ordinary client becomes a rollout with exact tokens."""
