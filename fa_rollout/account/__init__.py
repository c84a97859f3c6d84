"""The account of a run: figures and events that the hub writes, rules that judge them, words to show them."""
