"""The trainer's weights by the names that engines know, and whether they are those of the engines' model."""
