"""Published algorithms that are kept to compare with, and can be asked by name. Nothing else in the solvers needs them.

revolve, floating, checkmate                    chains
offload                                         chains with a link to the host
joins                                           uniform chains that meet in a loss
pipeline                                        pipelined model parallelism
weights                                         weights that wait on the host
"""
