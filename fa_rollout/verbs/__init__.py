"""The commands of `fa-rollout-proc`, one module each; `add(verbs)` adds its parser."""
