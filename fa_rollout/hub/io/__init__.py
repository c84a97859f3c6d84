"""What the hub watches and writes: sockets, plug-ins, the event log."""
