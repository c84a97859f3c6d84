"""The ring: a stream of variable-length records in shared memory, published through sockets.

Three roles, each in one process: the `RingWriter` claims, fills and commits; the `RingTable` (the hub's)
counts records and leases and moves the tail; each `RingReader` opens what it is told of. What goes between
them is a `Descriptor` and, backwards, the tail: nothing in the ring's memory is a flag, a lock or a cursor.

* Positions count bytes of an endless stream and never go back; a record's offset is its position modulo the
  size.
* Records are contiguous and never wrap; what is left before the ring's end is padding.
* A claim ends in one commit or abort. An aborted claim below a younger one is a hole until the tail passes
  it.
* A record is free when it is retired and its last lease has ended; space comes back in ring order. So free
  bytes are not claimable bytes: one old lease pins the span from itself to the head.
* The send of a descriptor, or of a tail, is the release store; its receipt is the acquire load. Each such
  pair is marked SYNC POINT on both sides.
"""
