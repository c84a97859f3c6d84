"""The connection of a rank to its hub, and of ranks to each other."""
