"""The cost of requests on a device, and the lower bounds that follow.

Sizes of the model, rates of the hardware, times of a request and of a subtree.
"""
