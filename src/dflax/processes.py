"""One program in several processes, one a host: who they are, told by the cluster or by hand."""

import re

import jax

from dflax.errors import DflaxError


def join(text: str) -> None:
    """Makes this process one of several, before anything is computed.

    text: "" is a process alone; "auto" lets TPU slices, Slurm and Open MPI say who is who; "HOST:PORT,COUNT,INDEX" names the address of
    the first process, their number and this one's place. Joining again is nothing.

    Raises DflaxError for another text, or where the others cannot be reached.
    """
    if not text or jax.distributed.is_initialized():
        return
    options = {}
    if text != "auto":
        match = re.fullmatch(r"(?P<host>[^,\s]+:\d+),(?P<count>\d+),(?P<index>\d+)", text)
        if match is None or int(match["index"]) >= int(match["count"]):
            raise DflaxError(
                f'distributed is {text!r}; it must be "", "auto" or HOST:PORT,COUNT,INDEX such as 10.0.0.1:8476,4,0'
            )
        options = {
            "coordinator_address": match["host"],
            "num_processes": int(match["count"]),
            "process_id": int(match["index"]),
        }
    try:
        jax.distributed.initialize(**options)
    except (RuntimeError, ValueError) as error:
        raise DflaxError(f"distributed {text!r}: {' '.join(str(error).split())[:300]}") from error
