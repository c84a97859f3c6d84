"""The generator process, without torch: prompts in, samples from engines, rewards, records into the ring."""
