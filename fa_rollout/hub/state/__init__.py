"""State machines of a run: ranks, steps, weight updates, evaluations, engines that join or leave."""
