"""New weights on their way from the trainer: files, HTTP or torch.distributed."""
