"""Ending a process; the tests' engines are not slime's to end."""


def kill_process_tree(pid: int, *args: object, **kwargs: object) -> None:
    raise RuntimeError(f"no process is to be killed, {pid} was")
