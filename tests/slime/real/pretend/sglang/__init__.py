"""What slime imports of SGLang beside its engines, for machines that have none."""

__version__ = "0.5.15"
