"""The commands of `fa-rollout-proc`; each module's `add(verbs)` adds its parser."""
