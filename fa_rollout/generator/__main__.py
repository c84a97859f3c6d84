"""`python -m fa_rollout.generator`; see `main`."""

from fa_rollout.generator.main import leave, main

leave(main)
