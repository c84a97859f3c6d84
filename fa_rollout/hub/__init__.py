"""The hub: owner of ring, ledger and batches; outlives the generator. No torch, no HTTP, no user code."""
