"""The loop of steps, the thread that owns it, and the door to it from the event loop."""
