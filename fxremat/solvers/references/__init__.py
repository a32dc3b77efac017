"""Published algorithms that are kept to compare with, and can be asked by name. Nothing else in the solvers needs them.

revolve, floating and checkmate solve chains, `offload` chains with a link to the host, `joins` uniform chains that meet
in a loss, `pipeline` pipelined model parallelism, and `weights` chooses weights that wait on the host.
"""
