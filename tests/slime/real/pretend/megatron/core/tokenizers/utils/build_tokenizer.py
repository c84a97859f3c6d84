"""No padding of the vocabulary."""


def vocab_size_with_padding(vocab_size: int, *args: object) -> int:
    return vocab_size
