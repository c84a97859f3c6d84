"""Engines that sample: the embedded one, the scripted one, and a real SGLang server on the CPU."""
