"""The process around the hub: connections, timers, the lives of the generator."""
