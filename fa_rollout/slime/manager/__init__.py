"""In slime's rollout manager: the hub, prompts in, samples out."""
