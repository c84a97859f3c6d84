"""Real SGLang on a machine without a GPU: an unmodified server, and its router, from an environment apart.

`commands` says what is run, `engines.supervisor` runs it and cleans up behind it, `launch.SGLangServer` is a
handle on a supervisor in a process of its own, `__main__` is the command line behind `scripts/sglang_cpu`.
Nothing here imports sglang: its packages and ours never meet in one process.
"""
