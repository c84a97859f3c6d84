"""The control channel: messages over Unix sockets, with their ends found and accepted."""
