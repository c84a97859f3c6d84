"""Engines that sample: the embedded one, and a real SGLang server on the CPU."""
