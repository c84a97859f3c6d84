"""Engines that sample: the embedded one and the scripted one."""
