"""Published algorithms, for comparison; users can choose them by name, but no other solver calls them.

revolve, floating and checkmate solve chains, `offload` chains with a link to the host, `joins` uniform chains that meet
in a loss, `pipeline` pipelined model parallelism, and `weights` chooses weights that wait on the host. In all of them,
a_l is the output of block l, A_l all that its backward reads, and "the thesis" A. Shilova, Memory Saving Strategies for
Deep Neural Network Training (2021).
"""
