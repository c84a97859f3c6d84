"""The slime plug-in: `--rollout-function-path fa_rollout.entry`. Nothing outside of here imports slime.

The rollout manager's process is launcher and only rank of a run; the generator is `generator.py` here.
"""
