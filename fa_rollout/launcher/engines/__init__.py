"""The engines that a run starts itself, and the router in front of them."""
