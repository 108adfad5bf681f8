"""Changes what autograd saves for backward, so that a step needs less memory.

recompute        recomputed instead of kept
copies           copies between device and host that run beside what is computed
offload          kept in the host's memory
host_weights     weights in the host's memory, fetched for each use
regather         gathered weights that are freed, and regathered
split_backward   what is kept between the halves of a split backward
"""
