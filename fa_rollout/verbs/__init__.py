"""The commands of `fa-rollout-proc`, a module each; `add(verbs)` declares one and names what runs it."""
