"""The slime plug-in: `--rollout-function-path fa_rollout.entry`. Nothing outside of this package imports slime.

The rollout manager's process is launcher and only rank of a run whose generator is `fa_rollout.slime.generator`.
"""
